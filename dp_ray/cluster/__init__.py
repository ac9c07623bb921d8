import logging

# In a notebook without ipywidgets, Ray would otherwise name those at its import, three times.
logging.getLogger("ray.widgets").setLevel(logging.WARNING)
