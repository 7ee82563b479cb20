#include "checkpoint/format/torch_pickles.h"

#include <algorithm>

namespace shardproof::checkpoint {

Value torch_tensor(Dtype dtype, const Shape& sizes, const std::string& key) {
  Value::Items size_items, stride_items(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    stride_items[d] = Value::integer(stride);
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  for (const int64_t size : sizes) size_items.push_back(Value::integer(size));
  const Value id = Value::tuple({Value::string("storage"), Value::global("torch", std::string(dtype_info(dtype).storage)),
                                 Value::string(key), Value::string("cpu"), Value::integer(numel(sizes))});
  return Value::reduced("torch._utils", "_rebuild_tensor_v2",
                        {Value::persistent(id), Value::integer(0), Value::tuple(size_items), Value::tuple(stride_items),
                         Value::boolean(false), Value::reduced("collections", "OrderedDict", {})});
}

void add_torch_records(ZipWriter& zip, const std::string& pickle) {
  zip.add("archive/data.pkl", pickle);
  zip.add("archive/byteorder", "little");
}

void add_torch_version(ZipWriter& zip) {
  zip.add("archive/version", "3\n");
}

}  // namespace shardproof::checkpoint
