"""Typed run files and plan files: what users write, checked field by field.

Start at ``run_file.py`` (the whole run file) and ``plan_file.py``; each section has a module of its own.
``section.py`` holds the rules that all sections share and ``report.py`` turns failures into one message.
"""
