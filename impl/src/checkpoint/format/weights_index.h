// Indices of weights in several files, "*.index.json", as Hugging Face's packages write them.
#pragma once

#include <map>
#include <string>

#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

struct WeightsIndex {
  std::string folder;                        // of the files
  std::map<std::string, std::string> files;  // by the tensor's name; file names without a folder
};

// Throws Error, which names the path, when it is no index, or when a file would lie outside its folder.
WeightsIndex read_weights_index(FileSystem& files, const std::string& path);

}  // namespace shardproof::checkpoint
