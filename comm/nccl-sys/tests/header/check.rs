//! Differences between a header and the declarations.

use std::collections::BTreeMap;

use nccl_sys::Version;
use nccl_sys::declared::{Declarations, Number, Presence, Struct};

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
        let mut problems = self.both_ways();
        problems.extend(self.signatures());
        problems.extend(self.values());
        problems.extend(self.fields());
        problems.extend(self.initializers());
        problems
    }

    /// Names that only one of the two has.
    fn both_ways(&self) -> Vec<String> {
        let (theirs, ours) = (self.names(), self.declared_names());
        let excepted = |name: &str| self.exceptions.iter().any(|(exception, _)| *exception == name);
        let undeclared =
            theirs.iter().filter(|name| !ours.contains_key(name.as_str()) && !excepted(name));
        let undeclared =
            undeclared.map(|name| format!("{name}: neither declared nor an exception"));
        let absent = ours.iter().filter(|(name, presence)| {
            presence.is_in(self.version) && !theirs.iter().any(|their| their == *name)
        });
        let absent = absent.map(|(name, presence)| {
            format!("{name}: declared ({presence:?}), and not in the header of {}", self.version)
        });
        let early = ours.iter().filter(|(name, presence)| {
            !presence.is_in(self.version) && theirs.iter().any(|their| their == *name)
        });
        let early = early.map(|(name, presence)| {
            format!("{name}: declared as newer ({presence:?}) than {}, which has it", self.version)
        });
        let twice = self.exceptions.iter().filter(|(name, _)| ours.contains_key(name));
        let twice = twice.map(|(name, _)| format!("{name}: declared, and an exception as well"));
        undeclared.chain(absent).chain(early).chain(twice).collect()
    }

    /// All public names of the header. Functions with a `p` before their name are the same functions, for profilers; initializers
    /// are compared with the structs that they make.
    fn names(&self) -> Vec<String> {
        let header = self.header;
        let functions = header.functions.iter().map(|function| &function.name);
        let enumerators = header.enums.iter().flat_map(|(_, numbers)| numbers);
        let all = functions
            .filter(|name| !name.starts_with("pnccl"))
            .chain(enumerators.map(|(name, _)| name))
            .chain(header.structs.iter().map(|(name, _)| name))
            .chain(&header.nested)
            .chain(&header.handles)
            .chain(header.defines.keys().filter(|name| !name.ends_with("_INITIALIZER")));
        all.cloned().collect()
    }

    /// All declared names, except those of CUDA, which are in other headers.
    fn declared_names(&self) -> BTreeMap<&'static str, Presence> {
        let all = self.declared;
        let functions = all.functions.iter().map(|it| (it.name, it.presence));
        let numbers = all.numbers.iter().copied().flatten().map(|it| (it.name, it.presence));
        let constants = all.constants.iter().map(|it| (it.name, it.presence));
        let structs = all.structs.iter().map(|it| (it.name, it.presence));
        let handles = all.handles.iter().map(|it| (it.name, it.presence));
        let names = functions.chain(numbers).chain(constants).chain(structs).chain(handles);
        names.filter(|(name, _)| !name.starts_with("cuda")).collect()
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
        let numbers = numbers.filter(|number| number.presence.is_in(self.version));
        let constants = self.declared.constants.iter();
        let constants = constants.filter(|constant| constant.presence.is_in(self.version));
        let differs = |name: &str, ours: f64, theirs: Option<f64>| {
            (theirs != Some(ours))
                .then(|| format!("{name}: declared {ours}, in the header {theirs:?}"))
        };
        let of_enums = numbers.filter_map(|number| {
            differs(number.name, number.value.into(), self.enumerator(number))
        });
        let of_macros = constants.filter_map(|constant| {
            let theirs = self.header.defines.get(constant.name);
            differs(constant.name, constant.value, theirs.and_then(|value| self.value(value)))
        });
        of_enums.chain(of_macros).collect()
    }

    fn enumerator(&self, number: &Number) -> Option<f64> {
        let (_, names) = self.header.enums.iter().find(|(name, _)| name == number.of)?;
        names.iter().find(|(name, _)| name == number.name).and_then(|(_, value)| self.value(value))
    }

    /// Structs whose fields differ in name, type or order.
    fn fields(&self) -> Vec<String> {
        let ours = self.declared.structs.iter().filter(|ours| ours.presence.is_in(self.version));
        let differs = |ours: &Struct| {
            let (_, theirs) = self.header.structs.iter().find(|(name, _)| name == ours.name)?;
            let known = ours.fields.iter().filter(|field| field.presence.is_in(self.version));
            let known: Vec<(String, String)> =
                known.map(|field| (field.name.to_owned(), field.type_name.to_owned())).collect();
            (known != *theirs)
                .then(|| format!("{}: declared {known:?}, in the header {theirs:?}", ours.name))
        };
        ours.filter_map(differs).collect()
    }

    /// Initializers that differ from ours. Each begins with the size of its struct, which identifies the struct.
    fn initializers(&self) -> Vec<String> {
        let all = self.header.defines.iter().filter(|(name, _)| name.ends_with("_INITIALIZER"));
        let wrong = |(name, value): (&String, &Vec<String>)| {
            let inside = value.get(1..value.len().saturating_sub(1)).unwrap_or_default();
            let theirs = parse::at_commas(inside);
            let made = theirs.first().and_then(|size| size.get(2)).cloned().unwrap_or_default();
            let Some(ours) = self.declared.structs.iter().find(|ours| ours.name == made) else {
                return Some(format!("{name}: makes {made:?}, which is not declared"));
            };
            let theirs: Vec<String> =
                theirs.into_iter().map(|value| self.initial(&value.join(" "))).collect();
            let ours = ours.fields.iter().filter(|field| field.presence.is_in(self.version));
            let ours: Vec<String> =
                ours.map(|field| self.initial(field.initial.unwrap_or("nothing"))).collect();
            (ours != theirs).then(|| format!("{name}: declared {ours:?}, in the header {theirs:?}"))
        };
        all.filter_map(wrong).collect()
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
        let ours = self.declared.constants.iter().find(|constant| constant.name == name);
        of_enums.filter_map(|(_, value)| self.value(value)).next().or(ours.map(|it| it.value))
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
