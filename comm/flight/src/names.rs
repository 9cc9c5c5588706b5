//! Enums that go by names in texts and in JSON, and by numbers in bytes.

/// An enum: `Name, "what it is" { Variant = "its name", ... }`.
macro_rules! names {
    (
        $(#[$doc:meta])*
        $name:ident, $what:literal {
            $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $text)] $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: [Self; [$($text),*].len()] = [$(Self::$variant),*];

            /// Its name, as it is displayed.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                use serde::de::{Error, Unexpected};

                if !deserializer.is_human_readable() {
                    let number = u32::deserialize(deserializer)?;
                    let found = Unexpected::Unsigned(number.into());
                    let numbered = Self::ALL.get(number as usize).copied();
                    return numbered.ok_or_else(|| D::Error::invalid_value(found, &$what));
                }
                let text = String::deserialize(deserializer)?;
                let named = Self::ALL.into_iter().find(|it| it.name() == text);
                named.ok_or_else(|| D::Error::invalid_value(Unexpected::Str(&text), &$what))
            }
        }
    };
}
