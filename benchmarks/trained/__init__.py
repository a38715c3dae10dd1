"""The tiny trained checkpoint: its training, the held-out questions, and how many answers are right.

    python -m benchmarks.trained train FOLDER --seed 0        goes on where it was cut off
    python -m benchmarks.trained task TASK                    held-out questions for `vlexport sweep --task`
    python -m benchmarks.trained measure PART FOLDER...       writes the tables of docs/trained.md

Scenes and questions are drawn in `benchmarks/trained/scenes.py`. The model is transformers' own class. Its
training runs all frames of a batch as one block-diagonal call, and all questions about a scene side by side,
each of them alone with the scene; tests hold both to transformers' forward pass.
"""
