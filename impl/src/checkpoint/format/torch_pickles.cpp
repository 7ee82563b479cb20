#include "checkpoint/format/torch_pickles.h"

#include "checkpoint/format/row_walk.h"

namespace shardproof::checkpoint {

Value torch_tensor(Dtype dtype, const Shape& sizes, const std::string& key) {
  const auto in_tuple = [](const Shape& numbers) {
    Value::Items items;
    for (const int64_t number : numbers) items.push_back(Value::integer(number));
    return Value::tuple(std::move(items));
  };
  const Value id = Value::tuple({Value::string("storage"), Value::global("torch", std::string(dtype_info(dtype).storage)),
                                 Value::string(key), Value::string("cpu"), Value::integer(numel(sizes))});
  return Value::reduced("torch._utils", "_rebuild_tensor_v2",
                        {Value::persistent(id), Value::integer(0), in_tuple(sizes), in_tuple(contiguous_strides(sizes)),
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
