"""MiniWoB++ in a real browser: web pages as text with references, and actions such as ``click(3)``.

``pages`` finds the pages, ``keeper`` and ``browser`` run Chromium, ``pool`` shares browsers among environments, ``page`` reads
a page and acts on it, ``actions`` reads what a model said, ``tasks`` and ``experts`` say what there is to do and how, and
``env`` is the environment.
"""
