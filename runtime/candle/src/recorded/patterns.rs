//! Groups names into units by patterns.

use hsdp_sharding::Unit;

use super::Parameter;
use crate::error::Error;

/// The pattern of all names that no other pattern takes, and the name of their unit.
const ROOT: &str = "root";

/// Returns the units of the parameters, in the order of the patterns.
pub(super) fn group(parameters: &[Parameter], patterns: &[&str]) -> Result<Vec<Unit>, Error> {
    let mut units: Vec<Vec<Unit>> = vec![Vec::new(); patterns.len()];
    let mut left = Vec::new();
    for parameter in parameters {
        let name = parameter.param.name.as_str();
        match taken(name, patterns) {
            Some((place, prefix)) => put(&mut units[place], prefix, parameter),
            None => left.push(name),
        }
    }
    if !left.is_empty() {
        return Err(Error::NoUnit { parameters: left.join(", ") });
    }
    match units.iter().position(Vec::is_empty) {
        Some(empty) => Err(Error::EmptyPattern { pattern: patterns[empty].to_owned() }),
        None => Ok(units.concat()),
    }
}

/// Returns the index of the pattern that takes a name, and the name of the unit.
fn taken<'a>(name: &'a str, patterns: &[&str]) -> Option<(usize, &'a str)> {
    let others = patterns.iter().enumerate().filter(|(_, pattern)| **pattern != ROOT);
    let root = || Some((patterns.iter().position(|pattern| *pattern == ROOT)?, ROOT));
    let mut matches = others.filter_map(|(place, pattern)| Some((place, matched(name, pattern)?)));
    matches.next().or_else(root)
}

/// Returns the first components of `name`, if the pattern matches them.
fn matched<'a>(name: &'a str, pattern: &str) -> Option<&'a str> {
    let mut end = 0;
    let mut components = name.split('.');
    for (place, wanted) in pattern.split('.').enumerate() {
        let component = components.next()?;
        if wanted != "*" && wanted != component {
            return None;
        }
        end += component.len() + usize::from(place > 0);
    }
    Some(&name[..end])
}

fn put(units: &mut Vec<Unit>, name: &str, parameter: &Parameter) {
    let place = units.iter().rposition(|unit| unit.name == name).unwrap_or_else(|| {
        units.push(Unit::new(name));
        units.len() - 1
    });
    let unit = std::mem::replace(&mut units[place], Unit::new("")).param(parameter.param.clone());
    units[place] = if parameter.is_tied { unit.keep() } else { unit };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_whole_components_from_the_start() {
        assert_eq!(matched("h.0.attn.weight", "h.*"), Some("h.0"));
        assert_eq!(matched("h.0.attn.weight", "h"), Some("h"));
        assert_eq!(matched("h.0.attn.weight", "*.0.attn"), Some("h.0.attn"));
        assert_eq!(matched("bias", "bias"), Some("bias"));
        assert_eq!(matched("h.0.attn.weight", "h.1"), None);
        assert_eq!(matched("heads.0", "h"), None);
        assert_eq!(matched("h", "h.*"), None);
        assert_eq!(matched("h.0", "0"), None);
    }
}
