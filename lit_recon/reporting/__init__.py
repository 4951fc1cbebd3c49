"""Files and reports of a run: run folder, record, tables, plots and HTML pages."""
