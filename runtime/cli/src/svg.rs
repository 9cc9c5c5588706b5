//! Escapes names for XML.

/// Maximum number of characters in a name. Longer names would overlap the bars.
const MOST: usize = 30;

/// Escapes the characters that have a meaning in XML.
pub(crate) fn text(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // XML allows these in no form.
            control if control.is_control() || matches!(control, '\u{fffe}' | '\u{ffff}') => {
                escaped.push('\u{fffd}');
            }
            other => escaped.push(other),
        }
    }
    escaped
}

/// Shortens a long name to its end, where names differ.
pub(crate) fn shortened(name: &str) -> String {
    let characters = name.chars().count();
    match characters > MOST {
        true => format!("…{}", name.chars().skip(characters + 1 - MOST).collect::<String>()),
        false => name.to_owned(),
    }
}
