// Which modules are units: what `call` asks.
#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "shardproof/hooks/unit.h"

namespace shardproof {

// Attaches hooks to modules, and detaches them when it is destroyed; the hooks must live as long.
class UnitAttachments {
 public:
  UnitAttachments() = default;
  ~UnitAttachments();
  UnitAttachments(const UnitAttachments&) = delete;
  void attach(std::shared_ptr<torch::nn::Module> module, UnitHooks& hooks);

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

// The same for styles and adapters, which it owns.
template <class Hooks>
class OwnedAttachments {
 public:
  OwnedAttachments() = default;
  ~OwnedAttachments();
  OwnedAttachments(const OwnedAttachments&) = delete;
  void attach(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Hooks> hooks);
  const std::vector<std::shared_ptr<torch::nn::Module>>& modules() const { return modules_; }

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<std::shared_ptr<Hooks>> hooks_;
};
using ParallelAttachments = OwnedAttachments<ParallelHooks>;
using AdapterAttachments = OwnedAttachments<AdapterHooks>;

// A Sequential calls its children's `forward` itself. This makes it enter those that are units, parallel, or adapted, through
// `call`, until the result is destroyed.
class SequentialEntries {
 public:
  explicit SequentialEntries(torch::nn::Module& root);
  ~SequentialEntries();
  SequentialEntries(const SequentialEntries&) = delete;

 private:
  struct Replaced;
  std::vector<Replaced> replaced_;
};

}  // namespace shardproof
