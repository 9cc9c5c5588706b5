//! Differences between a header and the declarations.

use std::collections::{BTreeMap, BTreeSet};

use nccl_sys::Version;
use nccl_sys::declared::{Declarations, Number, Struct};

use crate::parse::{self, Function, Header};
use crate::tokens::tokens;

/// A comparison. Each method returns a sentence for each difference.
#[derive(Debug)]
pub(crate) struct Check<'a> {
    pub(crate) header: &'a Header,
    pub(crate) declared: &'a Declarations,
    /// Names of the header that are not declared, with the reason.
    pub(crate) exceptions: &'a [(&'static str, &'static str)],
    /// The version of the header.
    pub(crate) version: Version,
}

impl Check<'_> {
    /// All differences.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = self.names_differ();
        problems.extend(self.signatures());
        problems.extend(self.values());
        problems.extend(self.fields());
        problems.extend(self.initializers());
        problems
    }

    /// Declared names that the header lacks or has earlier, and numbers that only the header has, in enums that functions return.
    fn names_differ(&self) -> Vec<String> {
        let theirs = self.names();
        let ours = self.declared_names();
        let declared = ours.iter().filter_map(|(name, since)| {
            match (*since <= self.version, theirs.contains(*name)) {
                (true, false) => Some(format!(
                    "{name}: declared (since {since}), and not in the header of {}",
                    self.version
                )),
                (false, true) => Some(format!(
                    "{name}: declared as newer (since {since}) than {}, which has it",
                    self.version
                )),
                _ => None,
            }
        });
        let excepted = |name: &str| self.exceptions.iter().any(|(exception, _)| *exception == name);
        let undeclared = self.returned_numbers();
        let undeclared = undeclared
            .filter(|name| !ours.contains_key(name.as_str()) && !excepted(name))
            .map(|name| format!("{name}: neither declared nor an exception"));
        let twice = self.exceptions.iter().filter(|(name, _)| ours.contains_key(name));
        let twice = twice.map(|(name, _)| format!("{name}: declared, and an exception as well"));
        declared.chain(undeclared).chain(twice).collect()
    }

    /// All public names of the header. Functions with a `p` before their name are the same functions, for profilers.
    fn names(&self) -> BTreeSet<&str> {
        let header = self.header;
        let functions = header.functions.iter().map(|function| &function.name);
        let enumerators = header.enums.iter().flat_map(|(_, numbers)| numbers);
        let structs = header.structs.iter().map(|(name, _)| name);
        let names = functions.chain(enumerators.map(|(name, _)| name)).chain(structs);
        names.chain(&header.handles).chain(header.defines.keys()).map(String::as_str).collect()
    }

    fn returned_numbers(&self) -> impl Iterator<Item = &String> {
        let functions = self.declared.functions.iter();
        let is_returned = move |of: &str| functions.clone().any(|function| function.returns == of);
        let enums = self.header.enums.iter().filter(move |(name, _)| is_returned(name));
        enums.flat_map(|(_, numbers)| numbers).map(|(name, _)| name)
    }

    /// All declared names, with their first versions.
    fn declared_names(&self) -> BTreeMap<&'static str, Version> {
        let all = self.declared;
        let functions = all.functions.iter().map(|it| it.name);
        let structs = all.structs.iter().map(|it| it.name);
        let old = functions.chain(structs).chain(all.handles.iter().copied());
        let numbers = all.numbers.iter().copied().flatten().map(|it| (it.name, it.since));
        old.map(|name| (name, Version::OLDEST)).chain(numbers).collect()
    }

    /// Functions whose arguments or results differ.
    fn signatures(&self) -> Vec<String> {
        let differs = |theirs: &Function| {
            let name = theirs.name.strip_prefix('p').unwrap_or(&theirs.name);
            let ours = self.declared.functions.iter().find(|function| function.name == name)?;
            let arguments = ours.arguments.iter().map(|(name, kind)| format!("{name}: {kind}"));
            let ours =
                format!("({}) -> {}", arguments.collect::<Vec<_>>().join(", "), ours.returns);
            let arguments = theirs.arguments.iter().map(|(name, kind)| format!("{name}: {kind}"));
            let header =
                format!("({}) -> {}", arguments.collect::<Vec<_>>().join(", "), theirs.returns);
            (ours != header)
                .then(|| format!("{}: declared {ours}, in the header {header}", theirs.name))
        };
        self.header.functions.iter().filter_map(differs).collect()
    }

    /// Constants whose numbers differ, and constants of enums that belong to another.
    fn values(&self) -> Vec<String> {
        let numbers = self.declared.numbers.iter().copied().flatten();
        let differs = |number: &Number| {
            let ours = number.value as f64;
            let theirs = self.value_of(number);
            (theirs != Some(ours))
                .then(|| format!("{}: declared {ours}, in the header {theirs:?}", number.name))
        };
        numbers.filter(|number| number.since <= self.version).filter_map(differs).collect()
    }

    fn value_of(&self, number: &Number) -> Option<f64> {
        if number.of.is_empty() {
            return self.value(self.header.defines.get(number.name)?);
        }
        let (_, names) = self.header.enums.iter().find(|(name, _)| name == number.of)?;
        names.iter().find(|(name, _)| name == number.name).and_then(|(_, value)| self.value(value))
    }

    /// Structs whose fields differ in name, type or order.
    fn fields(&self) -> Vec<String> {
        let differs = |ours: &Struct| {
            let (_, theirs) = self.header.structs.iter().find(|(name, _)| name == ours.name)?;
            let known = ours.fields.iter().filter(|field| field.since <= self.version);
            let known: Vec<(String, String)> =
                known.map(|field| (field.name.to_owned(), field.type_name.to_owned())).collect();
            (known != *theirs)
                .then(|| format!("{}: declared {known:?}, in the header {theirs:?}", ours.name))
        };
        self.declared.structs.iter().filter_map(differs).collect()
    }

    /// Initializers that differ from ours. Each begins with the size of its struct, which identifies the struct.
    fn initializers(&self) -> Vec<String> {
        let ours = self.declared.structs.iter();
        let ours = ours.filter(|ours| ours.fields.iter().any(|field| !field.initial.is_empty()));
        let differs = |ours: &Struct| {
            let Some((name, theirs)) = self.initializer_of(ours.name) else {
                return Some(format!("{}: the header has no initializer of it", ours.name));
            };
            let theirs: Vec<String> =
                theirs.into_iter().map(|value| self.initial(&value.join(" "))).collect();
            let ours = ours.fields.iter().filter(|field| field.since <= self.version);
            let ours: Vec<String> = ours.map(|field| self.initial(field.initial)).collect();
            (ours != theirs).then(|| format!("{name}: declared {ours:?}, in the header {theirs:?}"))
        };
        ours.filter_map(differs).collect()
    }

    /// The header's initializer of a struct: its name and its values.
    fn initializer_of(&self, made: &str) -> Option<(&String, Vec<&[String]>)> {
        let all = self.header.defines.iter().filter(|(name, _)| name.ends_with("_INITIALIZER"));
        let mut all = all.map(|(name, value)| {
            (
                name,
                parse::at_commas(value.get(1..value.len().saturating_sub(1)).unwrap_or_default()),
            )
        });
        all.find(|(_, values)| {
            values.first().and_then(|size| size.get(2)).is_some_and(|it| it == made)
        })
    }

    /// The value of a field in an initializer, in one form for C and Rust: a number, or one of three words.
    fn initial(&self, text: &str) -> String {
        let text = text.rsplit_once("_t::").map_or(text, |(_, name)| name.trim_end_matches(".0"));
        match text {
            "size_of::<Self>()" => "size".to_owned(),
            "Version::NEWEST.code()" => "version".to_owned(),
            "null()" | "null_mut()" | "NCCL_CONFIG_UNDEF_PTR" | "NULL" => "null".to_owned(),
            text if text.starts_with("sizeof") => "size".to_owned(),
            text if text.starts_with("NCCL_VERSION") => "version".to_owned(),
            text => self.value(&tokens(text)).map_or(text.to_owned(), |value| value.to_string()),
        }
    }

    /// The value of tokens of C: a literal, a name or a shift.
    fn value(&self, tokens: &[String]) -> Option<f64> {
        let words: Vec<&str> = tokens.iter().map(String::as_str).collect();
        match words[..] {
            ["INT_MIN"] => Some(i32::MIN.into()),
            ["INT_MAX"] => Some(i32::MAX.into()),
            ["-", number] => Some(-literal(number)?),
            [left, "<", "<", right] => Some(literal(left)? * literal(right)?.exp2()),
            [word] => literal(word).or_else(|| self.named(word)),
            _ => None,
        }
    }

    /// The value of a name: the header's, or else ours, since macros were once written out.
    fn named(&self, name: &str) -> Option<f64> {
        if let Some(value) = self.header.defines.get(name) {
            return self.value(value);
        }
        let of_enums = self.header.enums.iter().flat_map(|(_, names)| names);
        let of_enums = of_enums.filter(|(enumerator, _)| enumerator == name);
        let mut ours = self.declared.numbers.iter().copied().flatten();
        let ours = ours.find(|number| number.name == name).map(|number| number.value as f64);
        of_enums.filter_map(|(_, value)| self.value(value)).next().or(ours)
    }
}

/// `12`, `0x0c`, `12.0f`, and `0x0000_000c` of Rust.
fn literal(word: &str) -> Option<f64> {
    let word = word.replace('_', "");
    if let Some(digits) = word.strip_prefix("0x") {
        return u32::from_str_radix(digits, 16).ok().map(f64::from);
    }
    word.starts_with(|c: char| c.is_ascii_digit())
        .then(|| word.trim_end_matches('f').parse().ok())?
}
