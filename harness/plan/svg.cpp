#include "harness/plan/svg.h"

#include <fmt/format.h>

#include "harness/plan/xml.h"

namespace harness {
namespace {

std::string title_of(const std::string& about) {
  return about.empty() ? "" : fmt::format("<title>{}</title>", xml_text(about));
}

}  // namespace

void Svg::rectangle(double x, double y, double width, double height, const std::string& fill) {
  body_ += fmt::format("<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"/>\n", x, y, width,
                       height, fill);
}

void Svg::frame(double x, double y, double width, double height, const std::string& color) {
  body_ += fmt::format("<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"none\" stroke=\"{}\"/>\n", x,
                       y, width, height, color);
}

void Svg::line(double x, double y, double to_x, double to_y, const std::string& color, const std::string& dashes) {
  const std::string pattern = dashes.empty() ? "" : fmt::format(" stroke-dasharray=\"{}\"", dashes);
  body_ += fmt::format("<path d=\"M{:.2f} {:.2f}L{:.2f} {:.2f}\" stroke=\"{}\" stroke-width=\"1.5\"{}/>\n", x, y, to_x, to_y,
                       color, pattern);
}

void Svg::dot(double x, double y, const std::string& color, const std::string& about) {
  body_ += fmt::format("<circle cx=\"{:.2f}\" cy=\"{:.2f}\" r=\"3\" fill=\"{}\">{}</circle>\n", x, y, color, title_of(about));
}

void Svg::words(double x, double y, const std::string& text, double size, const char* anchor) {
  body_ += fmt::format("<text x=\"{:.2f}\" y=\"{:.2f}\" font-size=\"{:g}\" text-anchor=\"{}\">{}</text>\n", x, y, size, anchor,
                       xml_text(text));
}

std::string Svg::str() const {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:g}\" height=\"{1:g}\" viewBox=\"0 0 {0:g} {1:g}\" "
      "font-family=\"sans-serif\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{2}</svg>\n",
      width_, height_, body_);
}

}  // namespace harness
