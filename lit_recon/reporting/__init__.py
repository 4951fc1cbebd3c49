"""What a run leaves behind and how it is shown: run folder, record, tables, plots and HTML pages."""
