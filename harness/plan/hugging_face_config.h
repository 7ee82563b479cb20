// Models of the transformers package, by their config.json.
#pragma once

#include <string>

#include "golden/golden.h"

namespace harness {

// The model that the file describes: GPT-2, Llama, Mistral or Qwen3. Throws Error, which names the file and what it has that
// the models of this library have not: another family, biases in a Llama, heads of another size.
golden::Model model_of_config(const std::string& path);

}  // namespace harness
