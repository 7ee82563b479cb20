// Event files, which TensorBoard shows. Its own writer is a Python package; a file of numbers takes these few lines.
//
// A file is a run of records: the length of the data (8 bytes), its checksum (4), the data, its checksum (4), the lowest byte
// first. A checksum is CRC-32C, rotated right by 15 bits, plus 0xa282ead8. The data of each is one Event of protocol buffers:
// wall_time (1, double), step (2, varint), and file_version (3, string) in the first, or a summary (5) of values (1), each with
// tag (1, string) and simple_value (2, float), or a session_log (7) with status (1, varint), of which 1 is a start.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace harness {

class EventFile {
 public:
  // A new file in the folder, which is made if need be; "" writes nothing. Where the first step is above 1, TensorBoard is told
  // to forget that step and later ones of older files: a run that goes on trains them again. Throws Error when it cannot be
  // written.
  EventFile(const std::string& directory, int64_t begins_with);

  // Flushed at once, so that TensorBoard shows it while the run goes on.
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  void record(const std::string& event);

  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace harness
