"""A procedural renderer of blood smears. No image is copied: colours, sizes and shapes are
numbers, set after figures measured on a public set (Chula RBC-12, folds 1 to 3) and after its look.

polygons.py, shapes.py, fragments.py: outlines; looks.py, render.py: one cell; clutter.py: what else lies about;
stain.py: colour and optics; patients.py, plan.py: who has which cells; field.py: whole fields.
"""
