//! The modules of a crate, and which of them imports which.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::Source;

/// Maximum number of re-exports through which a name is followed.
const MOST_STEPS: usize = 16;

/// The name of a folder's own file in [`Imports`], beside those of the modules in the folder.
pub const OWN_FILE: &str = "self";

/// The names on the way from a crate's root to a module. The root has none.
type Module = Vec<String>;

/// The modules of a crate, and their imports.
///
/// An import leads to the module that defines the name: re-exports are followed.
#[derive(Debug)]
pub struct Modules {
    all: BTreeSet<Module>,
    imports: BTreeSet<Import>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Import {
    /// Path of the file, in the folder of the crate's sources.
    file: String,
    from: Module,
    to: Module,
}

/// A file without its comments and tests.
struct File<'a> {
    path: &'a str,
    module: Module,
    code: String,
    /// Paths that it imports, each with the name that they get.
    uses: Vec<(Vec<String>, String)>,
}

/// Names that modules have from elsewhere, with their paths.
type Names = BTreeMap<Module, BTreeMap<String, Vec<String>>>;

impl Modules {
    /// Reads the sources of a crate, which lie in `folder`, without its tests.
    ///
    /// # Panics
    /// If the folder has neither `lib.rs` nor `main.rs`.
    #[must_use]
    pub fn of(folder: &str, sources: &[Source]) -> Self {
        let files: Vec<File<'_>> = sources.iter().filter_map(|it| File::read(folder, it)).collect();
        assert!(files.iter().any(|it| it.module.is_empty()), "{folder}: a crate has a front page");
        let mut all = BTreeSet::new();
        let mut names = Names::new();
        for File { module, uses, .. } in &files {
            all.extend((0..=module.len()).map(|len| module[..len].to_vec()));
            let names = names.entry(module.clone()).or_default();
            names.extend(uses.iter().map(|(path, name)| (name.clone(), path.clone())));
        }
        let mut imports = BTreeSet::new();
        for file in &files {
            for path in file.paths(&all) {
                let to = resolve(&file.module, &path, &all, &names, MOST_STEPS);
                if let Some(to) = to.filter(|to| *to != file.module) {
                    let from = file.module.clone();
                    let file = file.path.to_owned();
                    imports.insert(Import { file, from, to });
                }
            }
        }
        Self { all, imports }
    }

    /// Returns the modules that have modules below them, with `::` between their names: first the
    /// root, whose name is empty.
    pub fn folders(&self) -> BTreeSet<String> {
        let below_root = self.all.iter().filter(|module| !module.is_empty());
        below_root.map(|module| module[..module.len() - 1].join("::")).collect()
    }

    /// Returns the imports between the modules directly below a module, and its own file. That of
    /// the root, which names all modules, is left out.
    #[must_use]
    pub fn below(&self, folder: &str) -> Imports {
        let folder: Module =
            folder.split("::").filter(|it| !it.is_empty()).map(str::to_owned).collect();
        let place = |module: &Module| {
            let rest = module.strip_prefix(&*folder)?;
            match rest.first() {
                Some(name) => Some(name.clone()),
                None => (!folder.is_empty()).then(|| OWN_FILE.to_owned()),
            }
        };
        let modules = self.all.iter().filter_map(place).map(|it| (it, BTreeMap::new()));
        let mut imports = Imports(modules.collect());
        for Import { file, from, to } in &self.imports {
            if let (Some(from), Some(to)) = (place(from), place(to))
                && from != to
            {
                let imported = imports.0.entry(from).or_default();
                imported.entry(to).or_default().insert(file.clone());
            }
        }
        imports
    }

    /// Returns the imports between modules directly below the root that are not `allowed`, given
    /// both modules: a line for each, which names the file and the module that it imports.
    #[must_use]
    pub fn forbidden(&self, allowed: impl Fn(&str, &str) -> bool) -> BTreeSet<String> {
        let is_wrong = |Import { from, to, .. }: &&Import| match (from.first(), to.first()) {
            (Some(from), Some(to)) => from != to && !allowed(from, to),
            _ => false,
        };
        let wrong = self.imports.iter().filter(is_wrong);
        wrong.map(|it| format!("{} imports {}", it.file, it.to.join("::"))).collect()
    }
}

impl<'a> File<'a> {
    fn read(folder: &str, source: &'a Source) -> Option<Self> {
        let path = source.path.strip_prefix(folder)?.strip_prefix('/')?;
        if source.path.ends_with("/tests.rs") || source.path.contains("/tests/") {
            return None;
        }
        let names = path.strip_suffix(".rs")?.split('/').map(str::to_owned);
        let is_front = ["lib.rs", "main.rs"].contains(&path);
        let module = if is_front { Module::new() } else { names.collect() };
        let (code, uses) = without_uses(&code(&source.text));
        Some(Self { path, module, code, uses })
    }

    /// Returns the paths in a file that may lead to other modules: those of its imports, and those
    /// in its code that begin at the root, at a parent, or at a module directly below it.
    fn paths(&self, all: &BTreeSet<Module>) -> Vec<Vec<String>> {
        let below = all.iter().filter_map(|module| match module.strip_prefix(&*self.module)? {
            [name] => Some(name.as_str()),
            _ => None,
        });
        let begins = ["crate", "super", "self"].into_iter().chain(below);
        let in_code = begins.flat_map(|begin| paths_from(&self.code, begin));
        self.uses.iter().map(|(path, _)| path.clone()).chain(in_code).collect()
    }
}

/// The imports between some modules, each with the files that have it.
#[derive(Debug)]
pub struct Imports(BTreeMap<String, BTreeMap<String, BTreeSet<String>>>);

impl Imports {
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
        let mut reached = BTreeSet::new();
        let mut next = vec![module];
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

/// Returns the module that defines the end of a path in `from`. `None` if the path does not begin
/// in this crate.
fn resolve(
    from: &Module,
    path: &[String],
    all: &BTreeSet<Module>,
    names: &Names,
    steps: usize,
) -> Option<Module> {
    let mut at = from.clone();
    let mut rest = path;
    match rest.first()?.as_str() {
        "crate" => (at, rest) = (Module::new(), &rest[1..]),
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|it| it == "super") {
                at.pop();
                rest = &rest[1..];
            }
        }
        name if all.contains(&child(&at, name)) => {}
        _ => return None,
    }
    while let Some((name, further)) = rest.split_first() {
        let inner = child(&at, name);
        if all.contains(&inner) {
            (at, rest) = (inner, further);
            continue;
        }
        let Some(behind) = names.get(&at).and_then(|names| names.get(name)) else { break };
        let path: Vec<String> = behind.iter().chain(further).cloned().collect();
        return resolve(&at, &path, all, names, steps.checked_sub(1)?);
    }
    Some(at)
}

fn child(module: &Module, name: &str) -> Module {
    module.iter().map(String::as_str).chain([name]).map(str::to_owned).collect()
}

/// A text without its comments, and without the tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    text.lines().map(|line| line.split("//").next().unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// Takes the imports out of a text. Returns what is left, and for each name the path that it stands
/// for.
fn without_uses(code: &str) -> (String, Vec<(Vec<String>, String)>) {
    let mut left = String::new();
    let mut uses = Vec::new();
    let mut rest = code;
    while !rest.is_empty() {
        let line = rest.split_inclusive('\n').next().unwrap_or(rest);
        let statement = line.trim_start();
        let visible = statement.strip_prefix("pub").map(|it| match it.strip_prefix('(') {
            Some(within) => within.split_once(')').map_or(within, |it| it.1).trim_start(),
            None => it.trim_start(),
        });
        if let Some(tree) = visible.unwrap_or(statement).strip_prefix("use ") {
            let begin = line.len() - tree.len();
            let tree = rest[begin..].split(';').next().unwrap_or("");
            expand(&[], tree, &mut uses);
            rest = &rest[begin + tree.len()..];
        } else {
            left += line;
            rest = &rest[line.len()..];
        }
    }
    (left, uses)
}

/// Adds the paths of a tree of imports, below `root`, each with its name.
fn expand(root: &[String], tree: &str, into: &mut Vec<(Vec<String>, String)>) {
    let (head, group) = match tree.split_once('{') {
        Some((head, group)) => (head, Some(group.trim_end().strip_suffix('}').unwrap_or(group))),
        None => (tree, None),
    };
    let (head, other_name) = head.split_once(" as ").unwrap_or((head, ""));
    let names = head.split("::").map(str::trim).filter(|it| !it.is_empty()).map(str::to_owned);
    let mut path: Vec<String> = root.iter().cloned().chain(names).collect();
    if let Some(group) = group {
        let mut depth = 0;
        let parts = group.split(|it| {
            depth += i32::from(it == '{') - i32::from(it == '}');
            it == ',' && depth == 0
        });
        return parts.filter(|it| !it.trim().is_empty()).for_each(|it| expand(&path, it, into));
    }
    if path.last().is_some_and(|it| it == "*" || it == "self" && path.len() > 1) {
        path.pop();
    }
    let name = if other_name.is_empty() { path.last().map_or("", |it| it) } else { other_name };
    let name = name.trim().to_owned();
    into.push((path, name));
}

/// Returns the paths in a text that begin with a name.
fn paths_from(code: &str, begin: &str) -> Vec<Vec<String>> {
    let root = format!("{begin}::");
    // A visibility, such as `pub(in crate::x)`, imports nothing.
    let begins = |(at, _): &(usize, &str)| {
        !code[..*at].ends_with(is_of_a_path) && !code[..*at].ends_with("(in ")
    };
    let paths = code.match_indices(&root).filter(begins).map(|(at, _)| {
        let path = code[at..].split(|it| !is_of_a_path(it)).next().unwrap_or("");
        path.split("::").filter(|it| !it.is_empty()).map(str::to_owned).collect()
    });
    paths.collect()
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

    fn modules(sources: &[(&str, &str)]) -> Modules {
        let sources: Vec<Source> = sources.iter().map(|(path, text)| source(path, text)).collect();
        Modules::of("x/src", &sources)
    }

    fn set<'a>(names: &[&'a str]) -> BTreeSet<&'a str> {
        names.iter().copied().collect()
    }

    /// `low` is imported, imports nothing, and so is in no circle; `high` is imported by tests and
    /// comments only.
    #[test]
    fn a_circle_is_found_by_whatever_way_its_modules_are_named() {
        let modules = modules(&[
            (
                "lib.rs",
                "pub use b::inner::{One, Two};\npub use self::c::C as Renamed;\npub use other::Three;",
            ),
            ("a.rs", "use crate::{\n    Three,\n    low::{self, x::{Y, Z}},\n    Two as Too,\n};"),
            ("b/inner.rs", "fn f() { crate::Renamed::g() } // crate::high"),
            ("c/deep.rs", "use super::super::a::A;\n#[cfg(test)]\nmod tests {\ncrate::high"),
            ("low.rs", "pub(in crate::low) struct X;"),
            ("high.rs", "use crate::One;\nuse super::low::*;"),
            ("c/tests.rs", "use crate::high::H;"),
        ]);
        let imports = modules.below("");
        assert_eq!(imports.modules().collect::<Vec<_>>(), ["a", "b", "c", "high", "low"]);
        assert_eq!(imports.circles(), [set(&["a", "b", "c"])].into());
        let told = imports.within(&set(&["a", "b", "c"]));
        let expected = "a imports b: {\"a.rs\"}\nb imports c: {\"b/inner.rs\"}\nc imports a: {\"c/deep.rs\"}\n";
        assert_eq!(told, expected);
        assert!(imports.within(&set(&["high", "low"])).starts_with("high imports low"));
    }

    #[test]
    fn two_circles_are_told_apart() {
        let modules = modules(&[
            ("lib.rs", ""),
            ("a.rs", "use crate::b;\nuse crate::c;"),
            ("b.rs", "use crate::a;"),
            ("c.rs", "use crate::d;"),
            ("d.rs", "use crate::c;"),
        ]);
        assert_eq!(modules.below("").circles(), [set(&["a", "b"]), set(&["c", "d"])].into());
    }

    /// A name that a folder's own file has from a sibling leads to the sibling, and one that the
    /// file defines leads to the file, which must not import the module then.
    #[test]
    fn a_circle_in_a_folder_is_found_also_through_its_own_file() {
        let sources = [
            ("lib.rs", "mod f;\nmod g;"),
            ("f.rs", "mod a;\nmod b;\nmod c;\nuse a::A;\npub use b::B;\nstruct Own(c::C);"),
            ("f/a.rs", "use super::B;"),
            ("f/b.rs", "pub(in crate::f) struct B;"),
            ("f/c.rs", "use crate::f::A;\nfn f() { super::b::g() }"),
            ("g.rs", "use crate::f::{B, Own};"),
        ];
        let right = modules(&sources);
        assert_eq!(right.folders().into_iter().collect::<Vec<_>>(), ["", "f"]);
        assert_eq!(right.below("f").modules().collect::<Vec<_>>(), ["a", "b", "c", OWN_FILE]);
        assert!(right.below("f").circles().is_empty() && right.below("").circles().is_empty());
        let with = |path, text| {
            let replaced = sources.map(|it| if it.0 == path { (path, text) } else { it });
            modules(&replaced)
        };
        for (path, text, circle) in [
            ("f/b.rs", "use super::A;", ["a", "b"]),
            ("f/b.rs", "use super::Own;", ["b", OWN_FILE]),
            ("f/b.rs", "use crate::f::c;", ["b", "c"]),
            ("f/c.rs", "fn f(_: super::Own) {}", ["c", OWN_FILE]),
        ] {
            let found = with(path, text).below("f");
            assert!(found.circles().iter().any(|it| it.is_superset(&set(&circle))), "{text}");
        }
    }

    #[test]
    fn an_import_that_is_not_allowed_is_named_with_its_file() {
        let modules = modules(&[
            ("lib.rs", "pub use b::B;"),
            ("a.rs", "use crate::B;\nuse crate::b::inner::{C, D};"),
            ("b.rs", "fn f() { crate::a::inner::g() }"),
            ("b/inner.rs", "use super::B;"),
            ("a/inner.rs", ""),
        ]);
        let upward = modules.forbidden(|from, to| from > to);
        assert_eq!(
            upward.into_iter().collect::<Vec<_>>(),
            ["a.rs imports b", "a.rs imports b::inner"]
        );
        let all = modules.forbidden(|_, _| false);
        assert!(all.contains("b.rs imports a::inner") && all.len() == 3, "{all:?}");
    }
}
