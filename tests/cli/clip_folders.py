"""A random CLIP in a folder, with a tokenizer of a few words, as transformers writes them."""

import torch


def save_clip(folder, words, seed=0, width=32):
    """2 layers, 2 heads, patches of 8 px, made for 32 px; attention is sharp enough for a swap to show."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    sizes = {"hidden_size": width, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
    text = sizes | {"vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 3, "bos_token_id": 2}
    vision = sizes | {"patch_size": 8, "image_size": 32}
    config = transformers.CLIPConfig(text_config=text | {"pad_token_id": 1}, vision_config=vision, projection_dim=16)
    torch.manual_seed(seed)
    model = transformers.CLIPModel(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[PAD]", "[BOS]", "[EOS]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[BOS]", 2), ("[EOS]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=special)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return str(folder)
