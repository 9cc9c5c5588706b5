//! C types in Rust's notation.

/// Types of C that have another name in Rust.
const NAMES: [(&str, &str); 15] = [
    ("void", "c_void"),
    ("char", "c_char"),
    ("int", "c_int"),
    ("unsigned int", "c_uint"),
    ("float", "f32"),
    ("size_t", "usize"),
    ("int8_t", "i8"),
    ("int16_t", "i16"),
    ("int32_t", "i32"),
    ("int64_t", "i64"),
    ("uint8_t", "u8"),
    ("uint16_t", "u16"),
    ("uint32_t", "u32"),
    ("uint64_t", "u64"),
    ("struct ncclConfigExt", "ncclConfigExt_t"),
];

/// A type and a name: `const void * sendbuff` is `sendbuff`, `*const c_void`.
///
/// # Errors
/// If there is no name, or the type is none of those in `nccl.h`.
pub(crate) fn named(tokens: &[String]) -> Result<(String, String), String> {
    if let [kind @ .., name, open, length, close] = tokens
        && (open.as_str(), close.as_str()) == ("[", "]")
    {
        return Ok((name.clone(), format!("[{}; {length}]", rust(kind)?)));
    }
    match tokens {
        [kind @ .., name] if !kind.is_empty() && name != "*" => Ok((name.clone(), rust(kind)?)),
        _ => Err(format!("{}: no type and name", tokens.join(" "))),
    }
}

/// `const char * *` is `*mut *const c_char`.
///
/// # Errors
/// If it is none of the types in `nccl.h`.
pub(crate) fn rust(tokens: &[String]) -> Result<String, String> {
    let stars = tokens.iter().position(|token| token == "*").unwrap_or(tokens.len());
    let (base, pointers) = tokens.split_at(stars);
    if base.is_empty() || pointers.iter().any(|token| token != "*") {
        return Err(format!("{}: a type that is not understood", tokens.join(" ")));
    }
    let constant = base.iter().any(|token| token == "const");
    let words: Vec<&str> =
        base.iter().map(String::as_str).filter(|token| *token != "const").collect();
    let base = words.join(" ");
    let known = NAMES.iter().find(|(c, _)| *c == base).map(|(_, rust)| (*rust).to_owned());
    let known = known.or_else(|| (words.len() == 1).then(|| base.clone()));
    let base = known.ok_or_else(|| format!("{base}: a type that is not understood"))?;
    // `const` qualifies the target of the innermost pointer. On a value it has no effect for a caller.
    let inner = if constant { "*const " } else { "*mut " };
    let levels = pointers.len();
    let pointers = (0..levels).rev().map(|level| if level == 0 { inner } else { "*mut " });
    Ok(pointers.collect::<String>() + &base)
}
