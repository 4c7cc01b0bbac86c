"""ResNet-18 and -50 for Keras, like torchvision's for PyTorch (He et al., 1512.03385)."""

from keras import KerasTensor, Model, layers

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


def convolution(x, filters, size, stride=1, relu=True):
    x = layers.Conv2D(filters, size, stride, "same", use_bias=False,
                      kernel_initializer="he_normal")(x)
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
    return layers.ReLU()(x) if relu else x


def basic_block(x, width, stride):
    x = convolution(x, width, 3, stride)
    return convolution(x, width, 3, relu=False)


def bottleneck(x, width, stride):
    x = convolution(x, width, 1)
    x = convolution(x, width, 3, stride)
    return convolution(x, 4 * width, 1, relu=False)


def resnet(name: str, inputs: KerasTensor, classes: int) -> Model:
    block = basic_block if name == "resnet18" else bottleneck
    x = layers.Concatenate()([inputs] * 3) if inputs.shape[-1] == 1 else inputs  # three channels
    x = layers.MaxPooling2D(3, 2, "same")(convolution(x, 64, 7, 2))
    for stage, block_count in enumerate(BLOCKS[name]):
        for index in range(block_count):
            stride = 2 if stage > 0 and index == 0 else 1
            y = block(x, 64 * 2**stage, stride)
            if x.shape != y.shape:
                x = convolution(x, y.shape[-1], 1, stride, relu=False)
            x = layers.ReLU()(layers.Add()([x, y]))
    return Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))
