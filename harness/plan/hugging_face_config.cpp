#include "harness/plan/hugging_face_config.h"

#include "harness/case/network.h"
#include "shardproof/checkpoint/hugging_face.h"

namespace harness {

golden::Model model_of_config(const std::string& path) {
  const shardproof::checkpoint::HuggingFaceModel described = shardproof::checkpoint::read_hugging_face_config(path);
  golden::Model model = described_model(described);
  // Its time and memory are those of the whole sequence, whatever window it attends within.
  model.llama.positions = described.positions;
  return model;
}

}  // namespace harness
