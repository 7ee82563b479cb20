// Models of Hugging Face's transformers package, by their config.json.
#pragma once

#include <string>

#include "golden/golden.h"

namespace harness {

// The model that the file, or a folder with it, describes (shardproof/checkpoint/hugging_face.h). Throws Error, which names the
// file and what it asks for that the models have not.
golden::Model model_of_config(const std::string& path);

}  // namespace harness
