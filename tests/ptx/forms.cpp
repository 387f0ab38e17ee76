#include "forms.h"

#include <unordered_map>

namespace ptx {
namespace {

struct Table {
  std::unordered_map<std::string, std::vector<const Form*>> by_name;
  std::vector<const Form*> all;
};

// Never destroyed: reports are written when the program ends.
Table& table() {
  static auto* const kept = new Table;
  return *kept;
}

const Table& complete_table() {
  static const bool done = [] {
    define_arithmetic();
    define_bits();
    define_comparisons();
    define_conversions();
    define_approximations();
    define_memory();
    define_control();
    define_warp();
    define_matrices();
    define_async_copies();
    return true;
  }();
  (void)done;
  return table();
}

// Loads, stores, moves and selections go through other units.
bool computes_in_double(const std::string& name) {
  const bool moves = name.starts_with("ld.") || name.starts_with("st.") ||
                     name.starts_with("mov.") || name.starts_with("selp.");
  return !moves && name.find(".f64") != std::string::npos;
}

}  // namespace

void define(Form form) {
  form.in_double = computes_in_double(form.name);
  const auto* const kept = new Form(std::move(form));
  table().by_name[kept->name].push_back(kept);
  table().all.push_back(kept);
}

std::vector<const Form*> forms_named(const std::string& name) {
  const auto& by_name = complete_table().by_name;
  const auto found = by_name.find(name);
  return found == by_name.end() ? std::vector<const Form*>() : found->second;
}

const std::vector<const Form*>& all_forms() { return complete_table().all; }

}  // namespace ptx
