// The library's arithmetic on a device without memory: it computes nothing, and counts what it would read and write.
#pragma once

#include <memory>

#include "harness/plan/step_record.h"
#include "shardproof/device/model_math.h"

namespace harness {

std::shared_ptr<const shardproof::ModelMath> meta_math();

// Where this thread's operators are written from now on; null: nowhere.
void record_operators_in(StepRecorder* recorder);
void record_operator(const Operator& what);

}  // namespace harness
