"""transformers' own `generate` on embeddings of a bundle.

python examples/transformers_generate.py CHECKPOINT BUNDLE photo.jpg "What is this?"

For families with `mm_encoder_outputs` in transformers and one placeholder for each token, such as Qwen2.5-VL.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutputWithPooling

import vlexport


def main(checkpoint, bundle, image, question):
    """Print the answer."""
    with vlexport.load(bundle) as pipeline:
        encoded = pipeline.encode(image)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint)
    slot = tokenizer.convert_ids_to_tokens(config.image_token_id)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt.replace(slot, slot * len(encoded.embeds)), return_tensors="pt")["input_ids"]

    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    answer = model.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == config.image_token_id).int(),
        mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=(encoded.embeds,))},
        image_grid_thw=torch.tensor([encoded.grid]),
        max_new_tokens=64,
        do_sample=False,
    )
    print(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
