#include "harness/plan/xml.h"

#include "shardproof/base/escape.h"

namespace harness {

std::string xml_text(const std::string& text) {
  std::string out;
  for (const char letter : shardproof::escaped(text)) {
    if (letter == '&')
      out += "&amp;";
    else if (letter == '<')
      out += "&lt;";
    else if (letter == '>')
      out += "&gt;";
    else if (letter == '"')
      out += "&quot;";
    else
      out += letter;
  }
  return out;
}

}  // namespace harness
