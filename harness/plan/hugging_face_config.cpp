#include "harness/plan/hugging_face_config.h"

#include "harness/case/network.h"
#include "shardproof/checkpoint/hugging_face.h"

namespace harness {

golden::Model model_of_config(const std::string& path) {
  return described_model(shardproof::checkpoint::read_hugging_face_config(path));
}

}  // namespace harness
