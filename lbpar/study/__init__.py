"""Studies: the papers' figures and tables redrawn beside ours, scaling studies, plots and reports."""
