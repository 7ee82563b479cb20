// The options of `train`: what a training run is asked for, on a command line.
#pragma once

#include <string>

#include "harness/commands/launch_options.h"
#include "harness/data/training_data.h"
#include "harness/train/train_options.h"

namespace harness {

struct TrainArguments {
  std::string model = "gpt(layers=2,hidden=64,heads=4,vocab=256,positions=64,tied)";
  std::string mesh = "dp_shard=2";
  DataOptions data;
  std::string token_type;
  bool shuffle = false;
  uint64_t data_seed = 1;
  std::string optimizer = "adamw", arithmetic = "native", precision = "float32", check;
  double lr = 1e-3, momentum = 0.9, weight_decay = 0.01;
  int64_t schedule_steps = 0;  // 0: all of them
  int64_t document_end = -1;   // -1: as the model says
  std::string json, tensorboard;
  std::string config;
  bool print_config = false;
  TrainOptions options;  // those that need no reading
  Launched launched;
  CLI::App* command = nullptr;

  void add_to(CLI::App& command);
  bool given(const std::string& option) const;
};

// Reads the file of --config. Throws as read_config does.
void read_config(TrainArguments& arguments);

// As they were asked for. Throws Error for words and numbers that mean nothing. `device`: where ranks compute.
TrainOptions train_options(const TrainArguments& arguments, c10::Device device);
DataOptions data_options(const TrainArguments& arguments, const golden::Model& model);

}  // namespace harness
