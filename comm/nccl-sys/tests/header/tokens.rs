//! A header as words and signs.

/// The tokens of a header without comments, and its `#define`s separately.
#[derive(Debug)]
pub(crate) struct Text {
    /// Names of macros without arguments, with the tokens of their values.
    pub(crate) defines: Vec<(String, Vec<String>)>,
    /// All lines that are not for the preprocessor. Lines in its conditions are included, whatever the condition.
    pub(crate) tokens: Vec<String>,
}

impl Text {
    /// # Errors
    /// If a comment does not end.
    pub(crate) fn read(header: &str) -> Result<Self, String> {
        let text = without_comments(header)?.replace("\\\n", " ");
        let (directives, code): (Vec<&str>, Vec<&str>) =
            text.lines().partition(|line| line.trim_start().starts_with('#'));
        let defines = directives.into_iter().filter_map(define).collect();
        Ok(Self { defines, tokens: code.into_iter().flat_map(tokens).collect() })
    }
}

fn without_comments(header: &str) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = header;
    while let Some(at) = rest.find("/*").into_iter().chain(rest.find("//")).min() {
        text.push_str(&rest[..at]);
        let end = if rest[at..].starts_with("/*") { "*/" } else { "\n" };
        let length = rest[at + 2..].find(end).ok_or("a comment that does not end")?;
        // The line must end where the comment does.
        rest = &rest[at + 2 + length + if end == "\n" { 0 } else { 2 }..];
    }
    Ok(text + rest)
}

/// `#define NAME value`; `None` for a macro with arguments.
fn define(line: &str) -> Option<(String, Vec<String>)> {
    let rest =
        line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("define")?.trim_start();
    let end = rest.find(|c: char| !is_of_a_word(c)).unwrap_or(rest.len());
    let (name, value) = rest.split_at(end);
    (!value.starts_with('(')).then(|| (name.to_owned(), tokens(value)))
}

/// Words (names and numbers) and single signs; a string is one token.
pub(crate) fn tokens(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = line.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => rest[1..].find('"').map_or(rest.len(), |at| at + 2),
            _ if is_of_a_word(first) => rest.find(|c| !is_of_a_word(c)).unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        found.push(token.to_owned());
        rest = after.trim_start();
    }
    found
}

fn is_of_a_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '.'
}
