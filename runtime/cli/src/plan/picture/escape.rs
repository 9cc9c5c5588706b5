//! Names as they may stand in XML.

/// Longer names would run into the bars.
const MOST: usize = 30;

/// The same text, with what XML reads otherwise written so that it does not.
pub(super) fn text(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // Not allowed in XML, in whatever spelling.
            control if control.is_control() || matches!(control, '\u{fffe}' | '\u{ffff}') => {
                escaped.push('\u{fffd}');
            }
            other => escaped.push(other),
        }
    }
    escaped
}

/// The end of a name that is too long, which is where names differ.
pub(super) fn shortened(name: &str) -> String {
    let characters = name.chars().count();
    match characters > MOST {
        true => format!("…{}", name.chars().skip(characters + 1 - MOST).collect::<String>()),
        false => name.to_owned(),
    }
}
