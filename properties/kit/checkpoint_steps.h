// Small checkpoints that say which step they are of.
#pragma once

#include "properties/kit/checkpoint_scratch.h"
#include "shardproof/checkpoint/box_read.h"
#include "shardproof/checkpoint/format/durable.h"

namespace shardproof::checkpoint {

inline Sample sample_of(int64_t step) {
  Random random(7);
  Sample sample;
  sample.tensors["w"] = at::full({3, 2}, static_cast<double>(step));
  sample.tensors["v"] = random_tensor(random, {5}, Dtype::BFloat16);
  sample.values["step"] = Value::integer(step);
  return sample;
}

inline void save_step(FileSystem& files, const std::string& target, int64_t step, bool overwrite = false) {
  Random random(8);
  StagedFolder staged(files, target, overwrite);
  write_sample(files, random, sample_of(step), staged.path(), 2);
  staged.commit();
}

// The step that the folder holds, every byte of it verified. Throws Error unless it is whole.
inline int64_t step_in(const std::string& folder) {
  const Verified verified = verify_checkpoint(system_files(), folder);
  if (!verified.problems.empty()) throw Error(folder + ": " + verified.problems[0].str());
  const Checkpoint checkpoint = open_checkpoint(system_files(), folder);
  const int64_t step = read_value(system_files(), folder, "step", checkpoint.values.at("step")).as_int("step");
  BoxReader reader(system_files(), folder, checkpoint);
  if (!reader.read("w").equal(at::full({3, 2}, static_cast<double>(step)))) throw Error(folder + ": w is of another step");
  return step;
}

}  // namespace shardproof::checkpoint
