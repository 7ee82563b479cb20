// A call on its way whose engine waits for it.
#pragma once

#include <memory>
#include <utility>

#include "shardproof/comm/comm.h"

namespace shardproof {

// `engine->wait(*operation)` is what waiting for the work is; it keeps both.
template <class Engine, class Operation>
Work work_of(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation) {
  class State final : public Work::State {
   public:
    State(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation)
        : engine_(std::move(engine)), operation_(std::move(operation)) {}
    void wait() override { engine_->wait(*operation_); }

   private:
    std::shared_ptr<Engine> engine_;
    std::shared_ptr<Operation> operation_;
  };
  return Work(std::make_shared<State>(std::move(engine), std::move(operation)));
}

}  // namespace shardproof
