import logging

# In a notebook without ipywidgets, Ray's import would otherwise print three hints to install them.
logging.getLogger("ray.widgets").setLevel(logging.WARNING)
