// How checkpoints of Hugging Face's transformers package name and lay out what the library's models have.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace harness {

// The model families by the package's names: "gpt2", whose projections are stored inputs x outputs, and "llama".
const std::vector<std::string>& hugging_face_families();

// The other side's name of a tensor, and whether it has the dims of the matrix the other way round.
struct OtherName {
  std::string name;
  bool turned = false;
};

// From the name in a package's checkpoint, with the base model's prefix or without, to that in a DCP checkpoint
// ("model.<parameter>"); nothing for what is no parameter, as GPT-2's masks.
std::optional<OtherName> from_hugging_face(const std::string& family, const std::string& name);
// Back; nothing for what is no parameter of a model, as the state of an optimizer.
std::optional<OtherName> to_hugging_face(const std::string& family, const std::string& key);

}  // namespace harness
