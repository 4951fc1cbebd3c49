"""LightningModules, DataModules and callbacks: wiring around plain functions."""
