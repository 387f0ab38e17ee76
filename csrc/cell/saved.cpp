#include "saved.h"

#include <sstream>

#include "lstm.h"

namespace fused_recoder {
namespace {

// What decides whether a tensor is kept.
struct Case {
  bool upper_layers, ensemble, decoder_bias;
  Problem p;  // its spec and signal only
};

struct Entry {
  const char* name;
  at::Tensor Saved::* tensor;
  const char* shape;
  bool is_index;
  bool (*kept)(const Case&);
};

bool always(const Case&) { return true; }
bool keeps_loss(const Case& c) { return c.p.spec.loss && !c.p.loss_waits_for_backward(); }
bool keeps_decoder(const Case& c) { return keeps_loss(c) && c.p.spec.decoder_grad; }

const Entry kTable[] = {
    {"gates", &Saved::gates, "L T R G", false, always},
    {"h", &Saved::h, "L T R H", false, always},
    {"c", &Saved::c, "L T R H", false, always},
    {"layer_inputs", &Saved::layer_inputs, "L-1 T R H", false,
     [](const Case& c) { return c.upper_layers && (c.p.recodes_h() || c.p.layer_p() > 0); }},
    {"step_grads", &Saved::step_grads, "L S T R H", false,
     [](const Case& c) {
       return c.p.recodes() && c.p.spec.step_grad && !c.p.differentiates_gradient();
     }},
    {"loss_grads", &Saved::loss_grads, "T R H", false, keeps_loss},
    {"decoder_weight_grad", &Saved::decoder_weight_grad, "decoder_weight", false, keeps_decoder},
    {"decoder_bias_grad", &Saved::decoder_bias_grad, "decoder_bias", false,
     [](const Case& c) { return keeps_decoder(c) && c.decoder_bias; }},
    {"member_log_p", &Saved::member_log_p, "K T B", false,
     [](const Case& c) { return c.p.spec.loss && c.ensemble; }},
    {"grad_h", &Saved::grad_h, "L T R H", false,
     [](const Case& c) { return c.p.differentiates_gradient(); }},
    {"alpha", &Saved::alpha, "L S T R", false,
     [](const Case& c) { return c.p.spec.exact && c.p.recodes(); }},
    {"chosen", &Saved::chosen, "T B", true,
     [](const Case& c) { return c.p.differentiates_gradient() && c.p.signal.reads_target; }},
};

Case case_of(const Spec& spec, bool upper_layers, bool ensemble, bool decoder_bias) {
  Case c{upper_layers, ensemble, decoder_bias, {}};
  c.p.spec = spec;
  c.p.signal = signal_family(spec.signal).facts;
  return c;
}

std::vector<int64_t> shape_of(const char* symbols, const Problem& p) {
  const bool has_decoder = !p.decoders.empty();
  std::vector<int64_t> shape;
  std::istringstream in(symbols);
  for (std::string symbol; in >> symbol;) {
    if (symbol == "decoder_weight" || symbol == "decoder_bias") {
      TORCH_CHECK_VALUE(has_decoder, "the decoder must be given where its gradient was kept");
      if (p.ensemble) shape.push_back(int64_t(p.decoders.size()));
      shape.push_back(p.V);
      if (symbol == "decoder_weight") shape.push_back(p.H);
      continue;
    }
    const std::pair<const char*, int64_t> sizes[] = {{"L", p.L},
                                                     {"L-1", p.L - 1},
                                                     {"T", p.T},
                                                     {"R", p.R},
                                                     {"B", p.B},
                                                     {"H", p.H},
                                                     {"G", kGates * p.H},
                                                     {"S", p.spec.states()},
                                                     {"K", int64_t(p.decoders.size())}};
    for (const auto& [name, size] : sizes)
      if (symbol == name) shape.push_back(size);
  }
  return shape;
}

}  // namespace

std::vector<at::Tensor> Saved::list() const {
  std::vector<at::Tensor> list;
  for (const Entry& entry : kTable)
    if ((this->*entry.tensor).defined()) list.push_back(this->*entry.tensor);
  return list;
}

Saved Saved::from_list(at::TensorList list, const Problem& p) {
  const Case c =
      case_of(p.spec, p.L > 1, p.ensemble, !p.decoders.empty() && p.decoders[0].bias.defined());
  Saved saved;
  size_t next = 0;
  for (const Entry& entry : kTable) {
    if (!entry.kept(c)) continue;
    TORCH_CHECK_VALUE(next < list.size(), "saved must hold ", entry.name, ", got ", list.size(),
                      " tensors");
    const at::Tensor& t = list[next++];
    const std::vector<int64_t> shape = shape_of(entry.shape, p);
    const std::string what = std::string("saved tensor ") + entry.name;
    const at::ScalarType type = entry.is_index ? at::kLong : p.h0.scalar_type();
    TORCH_CHECK_VALUE(t.sizes() == at::IntArrayRef(shape) && t.is_contiguous() &&
                          t.scalar_type() == type && t.device() == p.device(),
                      what,
                      " is not what recode_forward returned for these arguments: expected shape ",
                      at::IntArrayRef(shape), ", got ", t.sizes());
    saved.*entry.tensor = t;
    // The one that kernels use as an address.
    if (entry.is_index) check_targets_in_range(what.c_str(), t, p.V);
  }
  TORCH_CHECK_VALUE(next == list.size(), "saved must hold ", next, " tensors, got ", list.size());
  return saved;
}

std::vector<SavedTensor> saved_layout(const Spec& spec, bool upper_layers, bool ensemble,
                                      bool decoder_bias) {
  const Case c = case_of(spec, upper_layers, ensemble, decoder_bias);
  std::vector<SavedTensor> layout;
  for (const Entry& entry : kTable)
    if (entry.kept(c)) layout.push_back({entry.name, entry.shape, entry.is_index});
  return layout;
}

}  // namespace fused_recoder
