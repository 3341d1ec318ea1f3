"""A procedural renderer of blood smears. Pictures only: nothing here is learnt from patients.

polygons.py, shapes.py, fragments.py: outlines; looks.py, render.py: one cell; clutter.py: what else lies about;
stain.py: colour and optics; patients.py, plan.py: who has which cells; field.py: whole fields.
"""
