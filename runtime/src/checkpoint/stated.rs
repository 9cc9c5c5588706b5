//! The settings that a checkpoint and a model state.

use std::collections::{BTreeMap, BTreeSet};

use hsdp_checkpoint::Manifest;
use hsdp_warnings::cut;

use crate::state::context::Context;

/// Maximum number of characters of a setting's name or value in an error.
const MOST_SHOWN: usize = 100;

/// Compares the settings that a checkpoint states with those of the model. Returns a text for all
/// that differ, with both values of each. An older checkpoint states none, and a setting that only
/// the model states may be new in the program, so these alone make no other model.
pub(super) fn other_settings(context: &Context, manifest: &Manifest) -> Vec<String> {
    let own: BTreeMap<&str, &str> = context.plan.spec().settings().collect();
    let saved: BTreeMap<&str, &str> =
        manifest.settings.iter().map(|(name, value)| (&**name, &**value)).collect();
    if saved.iter().all(|(name, value)| own.get(name) == Some(value)) {
        return Vec::new();
    }
    let names: BTreeSet<&str> = saved.keys().chain(own.keys()).copied().collect();
    let shown = |value: Option<&&str>| cut(value.unwrap_or(&"missing"), MOST_SHOWN);
    let others = names.into_iter().filter(|name| saved.get(name) != own.get(name)).map(|name| {
        let [there, here] = [&saved, &own].map(|settings| shown(settings.get(name)));
        format!("{} is {there} there, and {here} here", cut(name, MOST_SHOWN))
    });
    vec![format!("its settings are others: {}", others.collect::<Vec<_>>().join(", "))]
}
