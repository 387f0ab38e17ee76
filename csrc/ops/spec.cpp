#include "spec.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <sstream>

namespace fused_recoder {
namespace {

// One way there and back per type: `python` is its name there.
template <typename T>
struct Field;

template <>
struct Field<std::string> {
  static constexpr const char* python = "str";
  static bool parse(const std::string& text, std::string& to) {
    to = text;
    return true;
  }
  static std::string encode(const std::string& value) { return value; }
};

template <>
struct Field<bool> {
  static constexpr const char* python = "bool";
  static bool parse(const std::string& text, bool& to) {
    to = text == "True";
    return to || text == "False";
  }
  static std::string encode(bool value) { return value ? "True" : "False"; }
};

template <typename T>
bool parse_number(const std::string& text, T& to) {
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, to);
  return error == std::errc() && stopped == end;
}

template <>
struct Field<int64_t> {
  static constexpr const char* python = "int";
  static bool parse(const std::string& text, int64_t& to) { return parse_number(text, to); }
  static std::string encode(int64_t value) { return std::to_string(value); }
};

template <>
struct Field<double> {
  static constexpr const char* python = "float";
  static bool parse(const std::string& text, double& to) { return parse_number(text, to); }
  static std::string encode(double value) {
    std::ostringstream out;
    out.precision(17);
    out << value;
    return out.str();
  }
};

template <>
struct Field<std::vector<int64_t>> {
  static constexpr const char* python = "tuple";
  static bool parse(const std::string& text, std::vector<int64_t>& to) {
    to.clear();
    std::istringstream in(text);
    for (std::string item; std::getline(in, item, ',');)
      if (!parse_number(item, to.emplace_back())) return false;
    return true;
  }
  static std::string encode(const std::vector<int64_t>& value) {
    std::string text;
    for (int64_t item : value) text += (text.empty() ? "" : ",") + std::to_string(item);
    return text;
  }
};

void set_field(Spec& spec, const std::string& name, const std::string& value) {
#define FR_SET(type, field, initial, meaning)                                               \
  if (name == #field) {                                                                     \
    TORCH_CHECK_VALUE(Field<type>::parse(value, spec.field), "spec: " #field " must be a ", \
                      Field<type>::python, ", got '", value, "'");                          \
    return;                                                                                 \
  }
  FR_SPEC_FIELDS(FR_SET)
#undef FR_SET
  TORCH_CHECK_VALUE(false, "spec: there is no field '", name, "'");
}

}  // namespace

Spec parse_spec(c10::string_view encoded) {
  Spec spec;
  std::istringstream in{std::string(encoded)};
  for (std::string item; std::getline(in, item, ';');) {
    const size_t sign = item.find('=');
    TORCH_CHECK_VALUE(sign != std::string::npos, "spec: expected name=value, got '", item, "'");
    set_field(spec, item.substr(0, sign), item.substr(sign + 1));
  }
  return spec;
}

std::vector<std::tuple<std::string, std::string, std::string, std::string>> spec_fields() {
  const Spec defaults;
  return {
#define FR_LIST(type, name, initial, meaning) \
  {#name, Field<type>::python, Field<type>::encode(defaults.name), meaning},
      FR_SPEC_FIELDS(FR_LIST)
#undef FR_LIST
  };
}

}  // namespace fused_recoder
