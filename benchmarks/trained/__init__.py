"""The tiny trained checkpoint: its training, the held-out questions, and how many answers are right.

    python -m benchmarks.trained train FOLDER --seed 0           goes on where it was cut off
    vlexport build FOLDER --backend onnxruntime
    python -m benchmarks.trained evaluate FOLDER --bundle BUNDLE
    python -m benchmarks.trained task TASK && vlexport sweep BUNDLE --decoder FOLDER --task TASK/task.jsonl

Scenes and questions are drawn in `recipes/demo/scenes.py`. The model is transformers' own class. Its training
runs all frames of a batch as one block-diagonal call, and all questions about a scene side by side, each of
them alone with the scene; tests hold both to transformers' forward pass.
"""
