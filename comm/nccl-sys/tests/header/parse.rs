//! The declarations of a header.

use std::collections::BTreeMap;

use nccl_sys::Version;

use crate::tokens::Text;
use crate::types;

/// Names with the tokens of their values.
type Numbers = Vec<(String, Vec<String>)>;
/// Names with types.
type Named = Vec<(String, String)>;

/// A header, in Rust's types.
#[derive(Debug, Default)]
pub(crate) struct Header {
    /// Macros without arguments.
    pub(crate) defines: BTreeMap<String, Vec<String>>,
    /// Enums, with names and the tokens of their values.
    pub(crate) enums: Vec<(String, Numbers)>,
    /// Structs, with names and types of their fields.
    pub(crate) structs: Vec<(String, Named)>,
    /// Structs that contain structs. Their fields are not compared.
    pub(crate) nested: Vec<String>,
    /// Pointers to structs.
    pub(crate) handles: Vec<String>,
    /// Functions.
    pub(crate) functions: Vec<Function>,
}

/// A function of a header.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Names and types.
    pub(crate) arguments: Named,
    /// Empty for `void`.
    pub(crate) returns: String,
}

impl Header {
    /// # Errors
    /// If there is a statement of a kind that `nccl.h` does not have.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = Text::read(text)?;
        let mut header = Self { defines: text.defines.into_iter().collect(), ..Self::default() };
        for statement in statements(&text.tokens) {
            let failed = |error| format!("{error}, in: {}", statement.join(" "));
            header.take(statement).map_err(failed)?;
        }
        Ok(header)
    }

    /// The version of the header.
    ///
    /// # Errors
    /// If the header does not define it.
    pub(crate) fn version(&self) -> Result<Version, String> {
        let code = self.defines.get("NCCL_VERSION_CODE").and_then(|value| value.first());
        let code = code.and_then(|code| code.parse().ok());
        code.map(Version::from_code).ok_or_else(|| "NCCL_VERSION_CODE is no number".to_owned())
    }

    fn take(&mut self, statement: &[String]) -> Result<(), String> {
        let words: Vec<&str> = statement.iter().map(String::as_str).collect();
        let inside = words
            .iter()
            .position(|word| *word == "{")
            .zip(words.iter().rposition(|word| *word == "}"));
        match (&words[..], inside) {
            (["typedef", "enum", .., name], Some((open, close))) => {
                self.enums.push(((*name).to_owned(), enumerators(&statement[open + 1..close])));
            }
            (["typedef", "struct", .., name], Some((open, close))) => {
                let fields = &statement[open + 1..close];
                if fields.iter().any(|token| token == "{") {
                    self.nested.push((*name).to_owned());
                } else {
                    self.structs.push(((*name).to_owned(), named(fields, ";")?));
                }
            }
            (["typedef", "struct", _, "*", name], None) => self.handles.push((*name).to_owned()),
            ([.., ")"], None) => self.functions.push(function(statement)?),
            _ => return Err("a statement that is not understood".to_owned()),
        }
        Ok(())
    }
}

/// The statements: each ends with a semicolon outside of braces. The braces of `extern "C"` are left out.
fn statements(tokens: &[String]) -> Vec<&[String]> {
    let mut found = Vec::new();
    let mut from = 0;
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "{" if tokens[from..at].join(" ") == "extern \"C\"" => from = at + 1,
            "{" => depth += 1,
            "}" if depth == 0 => from = at + 1,
            "}" => depth -= 1,
            ";" if depth == 0 => {
                found.push(&tokens[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    // A rest without a semicolon is an error, and must not be ignored.
    found.extend(Some(&tokens[from..]).filter(|rest| !rest.is_empty()));
    found
}

fn enumerators(tokens: &[String]) -> Numbers {
    let one = |tokens: &[String]| match tokens {
        [name, equals, value @ ..] if equals == "=" => Some((name.clone(), value.to_vec())),
        // A name without a value has no number here, which the check reports.
        [name, ..] => Some((name.clone(), Vec::new())),
        [] => None,
    };
    tokens.split(|token| token == ",").filter_map(one).collect()
}

/// Values between commas that are not in parentheses.
pub(crate) fn at_commas(tokens: &[String]) -> Vec<&[String]> {
    let mut depth = 0_usize;
    let parts = tokens.split(|token| {
        depth += usize::from(token == "(");
        depth -= usize::from(token == ")");
        token == "," && depth == 0
    });
    parts.filter(|part| !part.is_empty()).collect()
}

fn named(tokens: &[String], end: &str) -> Result<Named, String> {
    let parts = tokens.split(|token| token == end).filter(|part| !part.is_empty());
    parts.map(types::named).collect()
}

fn function(statement: &[String]) -> Result<Function, String> {
    let statement = without_attribute(statement);
    let open = statement.iter().position(|token| token == "(").ok_or("no arguments")?;
    let (name, returns) = types::named(&statement[..open])?;
    let arguments = &statement[open + 1..statement.len() - 1];
    let none = matches!(arguments, [only] if only == "void");
    let arguments = if none { Vec::new() } else { named(arguments, ",")? };
    let returns = if returns == "c_void" { String::new() } else { returns };
    Ok(Function { name, arguments, returns })
}

fn without_attribute(statement: &[String]) -> &[String] {
    if statement.first().is_none_or(|token| token != "__attribute__") {
        return statement;
    }
    let mut depth = 0_usize;
    let end = statement.iter().position(|token| {
        depth += usize::from(token == "(");
        depth -= usize::from(token == ")");
        token == ")" && depth == 0
    });
    end.map_or(statement, |end| &statement[end + 1..])
}
