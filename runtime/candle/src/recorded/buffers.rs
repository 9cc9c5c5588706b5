//! Tensors beside parameters that constructors ask for, and that a forward changes.

/// Names of such tensors in layers of PyTorch and candle: statistics of batch and instance norms,
/// and of codebooks that learn by moving averages.
const NAMES: [&str; 9] = [
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "cluster_size",
    "cluster_usage",
    "embed_avg",
    "embed_sum",
    "inited",
    "initialized",
];

/// Number of names that a message lists.
const LISTED: usize = 8;

/// Returns whether the last component of a name is the name of a buffer.
pub(crate) fn is_name(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| NAMES.contains(&last))
}

/// Joins the names for a message, and counts those beyond the first few.
pub(super) fn listed(names: &[String]) -> String {
    let mut listed = names[..names.len().min(LISTED)].join(", ");
    if names.len() > LISTED {
        listed += &format!(" and {} more", names.len() - LISTED);
    }
    listed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_component_decides() {
        assert!(is_name("running_mean") && is_name("layer1.0.bn1.running_var"));
        assert!(is_name("bn.num_batches_tracked"));
        assert!(!is_name("running_mean.weight") && !is_name("bn.weight") && !is_name(""));
    }

    #[test]
    fn a_long_list_is_cut() {
        let names: Vec<_> = (0..10).map(|at| format!("bn{at}.running_mean")).collect();
        assert_eq!(listed(&names[..2]), "bn0.running_mean, bn1.running_mean");
        assert!(listed(&names).ends_with("bn7.running_mean and 2 more"));
    }
}
