"""What a rank keeps in memory, by arithmetic: ZeRO's formula, and the activations of the GPT.

    python -m cluster.footprint --ranks 4 05_zero/fsdp.py     # the same, counted, in the top folder
"""

ROLES = ("parameters", "gradients", "master copy", "optimizer state")


def parameter_count(layers: int, width: int, context: int, vocabulary: int = 256) -> int:
    """Return the number of parameters of transformer.py's GPT."""
    embedding = (vocabulary + context) * width
    head = 2 * width + vocabulary * width  # a norm, and a linear layer without bias
    return embedding + layers * block_parameter_count(width) + head


def block_parameter_count(width: int) -> int:
    """Return the number of parameters of a block: two norms, attention, and a perceptron."""
    return 4 * width + 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width


def formula(stage: int, ranks: int, parameters: float) -> dict[str, float]:
    """Return the bytes of model state that ZeRO's paper (1910.02054) expects on each rank.

    parameters: of the network, in bf16. The master copy is in fp32, and so are Adam's two moments.
    """
    whole, shard = parameters, parameters / ranks
    return {"parameters": 2 * (shard if stage == 3 else whole),
            "gradients": 2 * (shard if stage >= 2 else whole),
            "master copy": 4 * (shard if stage >= 1 else whole),
            "optimizer state": 8 * (shard if stage >= 1 else whole)}


def activations(layers: int, width: int, heads: int, context: int, sequences: int, *,
                element_bytes: int, checkpointing: bool = False) -> int:
    """Return the bytes that backward needs of a forward of transformer.py's GPT, on the CPU.

    sequences: of the batch. element_bytes: of a number of the network. Counted from autograd: what
    each operation saves. (PyTorch's fused attention keeps no scores.)
    """
    fp32_or_more = max(4, element_bytes)  # the loss, and the sums of attention's softmax
    norm = element_bytes * (2 * width + 2)  # its input, its output, mean, standard deviation
    attention = element_bytes * 4 * width + fp32_or_more * heads  # query, key, value, output; sums
    mlp = element_bytes * 8 * width  # GELU's input and output
    block = element_bytes * width if checkpointing else 2 * norm + attention + mlp
    head = norm + fp32_or_more * 256 + 8  # the logits' softmax, the next token
    tokens = context * sequences
    return 8 * context + tokens * (8 + layers * block + head) + fp32_or_more  # and a sum of weights
