"""Show a run from its directory as a page of one HTML file.

Begin at `page.page_of`: it reads the run (`run_data.py`), draws its charts (`charts.py`) and renders the templates.
`comparison.py` writes the page of several runs.
The docs begin at docs/seeing-a-run.md.
"""
