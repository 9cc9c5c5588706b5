//! The modules directly below a crate's root, and which of them imports which.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::Source;

/// The imports between the modules directly below a crate's root, each with the files that have it.
#[derive(Debug)]
pub struct Imports(BTreeMap<String, BTreeMap<String, BTreeSet<String>>>);

impl Imports {
    /// Those of a crate whose sources lie in `folder`, without its tests.
    ///
    /// # Panics
    /// If the folder has neither `lib.rs` nor `main.rs`.
    #[must_use]
    pub fn between(folder: &str, sources: &[Source]) -> Self {
        let front_page = ["lib.rs", "main.rs"].map(|name| format!("{folder}/{name}"));
        let front_page = sources.iter().find(|it| front_page.contains(&it.path));
        let exports = exports(&code(&front_page.expect("a crate has a front page").text));
        let mut imports = Self(BTreeMap::new());
        for source in sources {
            let path = source.path.strip_prefix(folder).and_then(|path| path.strip_prefix('/'));
            let is_test = source.path.ends_with("/tests.rs") || source.path.contains("/tests/");
            let is_front = path.is_some_and(|path| ["lib.rs", "main.rs"].contains(&path));
            if let Some(path) = path.filter(|_| !is_front && !is_test) {
                imports.read(path, &code(&source.text), &exports);
            }
        }
        imports.keep_modules();
        imports
    }

    fn read(&mut self, path: &str, code: &str, exports: &BTreeMap<String, String>) {
        let module = path.split('/').next().unwrap_or(path).trim_end_matches(".rs");
        let imported = self.0.entry(module.to_owned()).or_default();
        let out = "super::".repeat(path.split('/').count());
        for name in named_after(code, "crate::").chain(named_after(code, &out)) {
            let name = exports.get(name).map_or(name, String::as_str);
            imported.entry(name.to_owned()).or_default().insert(path.to_owned());
        }
    }

    /// Forgets what is no module, and what a module imports of itself.
    fn keep_modules(&mut self) {
        let modules: BTreeSet<String> = self.0.keys().cloned().collect();
        for (own, imported) in &mut self.0 {
            imported.retain(|module, _| module != own && modules.contains(module));
        }
    }

    /// The modules.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The circles: modules that lead to each other. A module is in one of them at most.
    #[must_use]
    pub fn circles(&self) -> BTreeSet<BTreeSet<&str>> {
        let reached = |module| (module, self.reached_from(module));
        let reached: BTreeMap<&str, BTreeSet<&str>> = self.modules().map(reached).collect();
        let circle = |module: &&str| {
            let back = reached[module].iter().filter(|other| reached[**other].contains(module));
            back.copied().collect::<BTreeSet<_>>()
        };
        reached.keys().map(circle).filter(|circle| !circle.is_empty()).collect()
    }

    fn reached_from<'a>(&'a self, module: &'a str) -> BTreeSet<&'a str> {
        let (mut reached, mut next) = (BTreeSet::new(), vec![module]);
        while let Some(module) = next.pop() {
            let imported = self.0[module].keys().map(String::as_str);
            next.extend(imported.filter(|it| reached.insert(*it)));
        }
        reached
    }

    /// The imports between the modules of a circle: a line for each, with its files.
    #[must_use]
    pub fn within(&self, circle: &BTreeSet<&str>) -> String {
        let mut lines = String::new();
        for module in circle {
            for (other, files) in &self.0[*module] {
                if circle.contains(other.as_str()) {
                    lines += &format!("{module} imports {other}: {files:?}\n");
                }
            }
        }
        lines
    }
}

/// A text without its comments, and without the tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    text.lines().map(|line| line.split("//").next().unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// The names that a crate's root has from its modules, with their modules.
fn exports(root: &str) -> BTreeMap<String, String> {
    let mut exports = BTreeMap::new();
    for tree in root.split("pub use ").skip(1) {
        let tree = tree.strip_prefix("self::").unwrap_or(tree);
        let names = tree.split(';').next().unwrap_or(tree).split(|it| !is_of_a_name(it));
        let module = first_name(tree);
        exports.extend(names.map(|name| (name.to_owned(), module.to_owned())));
    }
    exports
}

/// The first names of the paths that begin with `root`: several, where a group of braces follows.
fn named_after<'a>(code: &'a str, root: &str) -> impl Iterator<Item = &'a str> {
    let begins = move |(at, _): &(usize, &str)| !code[..*at].ends_with(is_of_a_path);
    let paths = code.match_indices(root).filter(begins);
    paths.flat_map(|(at, root)| heads(&code[at + root.len()..])).collect::<Vec<_>>().into_iter()
}

fn heads(tree: &str) -> Vec<&str> {
    let Some(group) = tree.strip_prefix('{') else { return vec![first_name(tree)] };
    let (mut depth, mut inner) = (0, 0);
    let end = group.find(|it| {
        depth += step(it);
        depth < 0
    });
    let parts = group[..end.unwrap_or(group.len())].split(|it| {
        inner += step(it);
        it == ',' && inner == 0
    });
    parts.map(first_name).filter(|name| !name.is_empty()).collect()
}

fn step(character: char) -> i32 {
    i32::from(character == '{') - i32::from(character == '}')
}

fn first_name(tree: &str) -> &str {
    tree.trim_start().split(|it| !is_of_a_name(it)).next().unwrap_or("")
}

fn is_of_a_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn is_of_a_path(character: char) -> bool {
    is_of_a_name(character) || character == ':' || character == '$'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: format!("x/src/{path}"), text: text.to_owned() }
    }

    fn set<'a>(names: &[&'a str]) -> BTreeSet<&'a str> {
        names.iter().copied().collect()
    }

    /// `low` is imported, imports nothing, and so is in no circle; `high` is imported by tests and comments only.
    #[test]
    fn a_circle_is_found_by_whatever_way_its_modules_are_named() {
        let sources = [
            source(
                "lib.rs",
                "pub use b::inner::{One, Two};\npub use self::c::C;\npub use other::Three;",
            ),
            source("a.rs", "use crate::{\n    Three,\n    low::{self, x::{Y, Z}},\n    Two,\n};"),
            source("b/inner.rs", "fn f() { crate::C::g() } // crate::high"),
            source("c/deep.rs", "use super::super::a::A;\n#[cfg(test)]\nmod tests {\ncrate::high"),
            source("low.rs", "pub(in crate::low) struct X;"),
            source("high.rs", "use crate::One;\nuse super::low::X;"),
            source("c/tests.rs", "use crate::high::H;"),
        ];
        let imports = Imports::between("x/src", &sources);
        assert_eq!(imports.modules().collect::<Vec<_>>(), ["a", "b", "c", "high", "low"]);
        assert_eq!(imports.circles(), [set(&["a", "b", "c"])].into());
        let told = imports.within(&set(&["a", "b", "c"]));
        let expected = "a imports b: {\"a.rs\"}\nb imports c: {\"b/inner.rs\"}\nc imports a: {\"c/deep.rs\"}\n";
        assert_eq!(told, expected);
        assert!(imports.within(&set(&["high", "low"])).starts_with("high imports low"));
    }

    #[test]
    fn two_circles_are_told_apart() {
        let sources = [
            source("lib.rs", ""),
            source("a.rs", "use crate::b;\nuse crate::c;"),
            source("b.rs", "use crate::a;"),
            source("c.rs", "use crate::d;"),
            source("d.rs", "use crate::c;"),
        ];
        let imports = Imports::between("x/src", &sources);
        assert_eq!(imports.circles(), [set(&["a", "b"]), set(&["c", "d"])].into());
    }
}
