//! Lists and likely causes of parameters without a gradient.

use std::fmt::Write as _;

use hsdp_sharding::Param;

use crate::error::CUTS;

/// A layer and its parameters without a gradient.
struct LostLayer<'a> {
    path: &'a str,
    leaves: Vec<&'a str>,
}

impl LostLayer<'_> {
    /// Returns the last component of the path.
    fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or_default()
    }

    /// Returns whether the layer has the name and the parameters of a norm.
    fn is_norm(&self) -> bool {
        let name = self.name().to_ascii_lowercase();
        (name.contains("norm") || name.starts_with("ln") || name.ends_with("_ln"))
            && self.leaves.iter().all(|leaf| ["weight", "bias", "gamma", "beta"].contains(leaf))
    }

    fn has_bias(&self) -> bool {
        self.leaves.iter().any(|leaf| ["bias", "beta"].contains(leaf))
    }

    /// Returns the path, split at the first component that is a number.
    fn around_number(&self) -> Option<(&str, usize, &str)> {
        let mut start = 0;
        for component in self.path.split('.') {
            if let Ok(number) = component.parse() {
                let end = start + component.len();
                return Some((&self.path[..start], number, &self.path[end..]));
            }
            start += component.len() + 1;
        }
        None
    }
}

/// Collects parameters by layer, in their order.
fn layers<'a>(lost: &[&'a Param]) -> Vec<LostLayer<'a>> {
    let mut layers = Vec::<LostLayer<'_>>::new();
    for param in lost {
        let (path, leaf) = param.name.rsplit_once('.').unwrap_or(("", &param.name));
        match layers.iter_mut().find(|layer| layer.path == path) {
            Some(layer) => layer.leaves.push(leaf),
            None => layers.push(LostLayer { path, leaves: vec![leaf] }),
        }
    }
    layers
}

/// Lists all parameters by layer, as a shell would write them: `h.{0,1}.mlp.{weight,bias}`.
pub(super) fn listed(lost: &[&Param]) -> String {
    let mut listed: Vec<(&LostLayer<'_>, Vec<usize>)> = Vec::new();
    let layers = layers(lost);
    for layer in &layers {
        let like = layer.around_number().and_then(|(before, number, after)| {
            let same = listed.iter_mut().find(|(other, _)| {
                other.leaves == layer.leaves
                    && other.around_number().is_some_and(|it| (it.0, it.2) == (before, after))
            });
            same.map(|(_, numbers)| numbers.push(number))
        });
        if like.is_none() {
            listed.push((layer, layer.around_number().map(|it| it.1).into_iter().collect()));
        }
    }
    let mut text = String::new();
    for (layer, numbers) in listed {
        if !text.is_empty() {
            text += "; ";
        }
        match layer.around_number() {
            Some((before, _, after)) => text += &format!("{before}{}{after}", braced(&numbers)),
            None => text += layer.path,
        }
        if !layer.path.is_empty() {
            text += ".";
        }
        text += &braced(&layer.leaves);
    }
    text
}

/// Joins alternatives in braces, or returns the only one as it is.
fn braced<T: ToString>(alternatives: &[T]) -> String {
    let joined = alternatives.iter().map(T::to_string).collect::<Vec<_>>().join(",");
    if alternatives.len() == 1 { joined } else { format!("{{{joined}}}") }
}

/// Returns the likely causes. Causes that the names show come before the causes of any model.
pub(super) fn causes(lost: &[&Param], was_asked_for: impl Fn(&str) -> bool) -> String {
    let mut causes = String::new();
    let unasked: Vec<_> = lost.iter().copied().filter(|it| !was_asked_for(&it.name)).collect();
    if !unasked.is_empty() {
        let unasked = listed(&unasked);
        let _ = write!(causes, "the loss did not make the layers of {unasked}; ");
    }
    let asked: Vec<_> = lost.iter().copied().filter(|it| was_asked_for(&it.name)).collect();
    let layers = layers(&asked);
    let norms = |has_bias| {
        layers.iter().filter(move |layer| layer.is_norm() && layer.has_bias() == has_bias)
    };
    for (has_bias, function) in [(false, "rms_norm"), (true, "layer_norm")] {
        if let Some(last) = norms(has_bias).next_back() {
            let path = last.path;
            let count = norms(has_bias).count();
            let _ = write!(
                causes,
                "{path} ({count} such in all) is a norm that cuts, with all before it, if it is \
                 candle_nn's: use `hsdp_models::nn::{function}`; "
            );
        }
    }
    if let Some(path) = attention(&layers) {
        let _ = write!(
            causes,
            "{path} loses its queries and keys, but not its values: its softmax or its rotary \
             embedding cuts, use `hsdp_models::nn::attention` and `rope`; "
        );
    }
    causes + CUTS
}

/// Finds an attention without gradients for queries and keys, but with gradients for values.
fn attention<'a>(layers: &[LostLayer<'a>]) -> Option<&'a str> {
    let split = |path: &'a str| path.rsplit_once('.').unwrap_or(("", path));
    let has = |parent: &str, initial| {
        layers.iter().any(|it| {
            let (of, name) = split(it.path);
            of == parent && name.trim_start_matches("to_").starts_with(initial)
        })
    };
    layers.iter().map(|layer| split(layer.path).0).find(|parent| {
        has(parent, 'q') && has(parent, 'k') && !has(parent, 'v') && !parent.is_empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(names: &[&str]) -> Vec<Param> {
        names.iter().map(|name| Param::new(*name, [2])).collect()
    }

    fn with(names: &[&str], report: impl Fn(&[&Param]) -> String) -> String {
        let params = params(names);
        report(&params.iter().collect::<Vec<_>>())
    }

    #[test]
    fn a_list_names_each_parameter_once() {
        let names = [
            "wte",
            "h.0.q.weight",
            "h.0.q.bias",
            "h.0.experts.1.w",
            "h.1.q.weight",
            "h.1.q.bias",
            "h.1.experts.0.w",
            "h.2.q.weight",
            "norm.weight",
        ];
        let want = "wte; h.{0,1}.q.{weight,bias}; h.0.experts.1.w; h.1.experts.0.w; h.2.q.weight; \
                    norm.weight";
        assert_eq!(with(&names, listed), want);
    }

    #[test]
    fn causes_are_read_from_names() {
        let said =
            |names: &[&str]| with(names, |lost| causes(lost, |name| name != "pooler.weight"));
        let said_of_norms =
            said(&["h.0.norm1.weight", "h.1.norm1.weight", "ln_f.weight", "ln_f.bias"]);
        assert!(said_of_norms.starts_with("h.1.norm1 (2 such in all)"), "{said_of_norms}");
        assert!(said_of_norms.contains("ln_f (1 such in all)"), "{said_of_norms}");
        assert!(said_of_norms.contains("nn::layer_norm`"), "{said_of_norms}");
        let attention = said(&["h.0.attn.q_proj.weight", "h.0.attn.k_proj.weight"]);
        assert!(attention.starts_with("h.0.attn loses its queries and keys"), "{attention}");
        let values = said(&["h.0.attn.q.weight", "h.0.attn.k.weight", "h.0.attn.v.weight"]);
        assert_eq!(values, CUTS);
        let pooler = said(&["pooler.weight"]);
        assert!(
            pooler.starts_with("the loss did not make the layers of pooler.weight;"),
            "{pooler}"
        );
    }
}
