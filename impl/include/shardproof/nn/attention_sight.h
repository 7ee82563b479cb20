// Which keys the queries of an attention see.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace shardproof {

struct AttentionSight {
  // Throws Error when the window is below 0, or limits an attention that is not causal. `true` alone is plain and causal.
  AttentionSight(bool causal = true, int64_t window = 0);
  AttentionSight(int, int64_t = 0) = delete;  // a number alone would say whether it is causal
  AttentionSight(int64_t, int64_t = 0) = delete;

  bool causal;  // a query sees no key beyond its own position
  // How many keys a query sees, up to its own; 0: all of them. This is sliding_window of Mistral in Hugging Face's package.
  int64_t window;
  // The number of each position's document, int64 [B, T] of whole sequences: a query sees the keys of its own document.
  // Undefined: each sequence is one document.
  at::Tensor documents = {};

  // Of a sequence of that length: whether a query sees every key that its position lets it see.
  bool sees_all_before(int64_t length) const { return (window == 0 || window >= length) && !documents.defined(); }
  // Throws Error when documents have other sizes than [samples, length].
  void require_fit(int64_t samples, int64_t length) const;
  // Which keys are hidden from which queries, whose positions in the whole sequence are given as int64 [queries] and [keys] on
  // one device: bool [1 or B, 1, queries, keys] there. Undefined where every query sees every key.
  at::Tensor hidden(const at::Tensor& queries, const at::Tensor& keys) const;
  // The same for canonical_ops::attention, which is told what is causal: undefined where nothing else hides a key of a sequence
  // of `length` positions.
  at::Tensor hidden_besides(const std::vector<int64_t>& queries, const std::vector<int64_t>& keys, int64_t length,
                            c10::Device device) const;
};

}  // namespace shardproof
