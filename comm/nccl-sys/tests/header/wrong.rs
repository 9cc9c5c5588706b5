//! Tests that the check can fail: small headers with one mistake each.

use libtest_mimic::{Failed, Trial};
use nccl_sys::Version;
use nccl_sys::declared::{Declarations, Field, Function, Number, Struct};

use crate::check::Check;
use crate::parse::Header;

/// A header in the style of `nccl.h`.
const HEADER: &str = r#"
/* A comment; with a semicolon. */
#include <limits.h>
#define NCCL_VERSION_CODE 22403
#ifdef __cplusplus
extern "C" {
#endif
#define NCCL_MAGIC 0x10 // another comment;
#define NCCL_LESS -1
#define NCCL_UNSET INT_MIN
typedef struct ncclThing* ncclThing_t;
typedef enum { ncclGood = 0,
               ncclBad  = 1 << 1, ncclNumStates = 3, } ncclState_t;
typedef struct ncclOptions_v2 {
  size_t size;
  unsigned int version;
  const char *name; int count;
} ncclOptions_t;
#define NCCL_OPTIONS_INITIALIZER { sizeof(ncclOptions_t), NCCL_VERSION_CODE, \
  NULL, NCCL_UNSET, }
ncclState_t  ncclMake(ncclThing_t* thing, const void* from, int rank, int root);
ncclState_t pncclMake(ncclThing_t* thing, const void* from, int rank, int root);
const char* ncclName(const ncclThing_t thing);
__attribute__ ((deprecated("it is (old)")))
void ncclSay(void);
#ifdef __cplusplus
} // end
#endif
"#;

const fn field(name: &'static str, type_name: &'static str, initial: &'static str) -> Field {
    Field { name, type_name, offset: 0, initial, since: Version::OLDEST }
}

const fn number(name: &'static str, value: i64) -> Number {
    Number { of: "ncclState_t", name, value, since: Version::OLDEST }
}

const fn constant(name: &'static str, value: i64) -> Number {
    Number { of: "", ..number(name, value) }
}

const LATER: Version = Version::new(2, 25, 1);

/// The declarations of the header.
const DECLARED: Declarations = Declarations {
    functions: &[
        Function {
            name: "ncclMake",
            arguments: &[
                ("thing", "*mut ncclThing_t"),
                ("from", "*const c_void"),
                ("rank", "c_int"),
                ("root", "c_int"),
            ],
            returns: "ncclState_t",
        },
        Function {
            name: "ncclName",
            arguments: &[("thing", "ncclThing_t")],
            returns: "*const c_char",
        },
    ],
    numbers: &[
        &[number("ncclGood", 0), number("ncclBad", 2)],
        &[
            constant("NCCL_MAGIC", 16),
            Number { since: Version::new(2, 24, 3), ..constant("NCCL_LESS", -1) },
            constant("NCCL_UNSET", -2_147_483_648),
            Number { since: LATER, ..constant("NCCL_LATER", 1) },
        ],
    ],
    structs: &[Struct {
        name: "ncclOptions_t",
        fields: &[
            field("size", "usize", "size_of::<Self>()"),
            field("version", "c_uint", "Version::NEWEST.code()"),
            field("name", "*const c_char", "null()"),
            field("count", "c_int", "NCCL_UNSET"),
            Field { since: LATER, ..field("later", "c_int", "NCCL_UNSET") },
        ],
    }],
    handles: &["ncclThing_t"],
};

const EXCEPTIONS: &[(&str, &str)] = &[("ncclNumStates", "it counts")];

/// A mistake: its name, a text and its replacement, and the beginnings of the sentences that the check must return.
type Mistake = (&'static str, [&'static str; 2], &'static [&'static str]);

const MISTAKES: [Mistake; 23] = [
    ("nothing", ["", ""], &[]),
    (
        "an_argument_of_another_type",
        ["int rank, int root);\nn", "size_t rank, int root);\nn"],
        &["ncclMake: declared"],
    ),
    (
        "arguments_in_another_order",
        ["int rank, int root", "int root, int rank"],
        &["ncclMake: declared", "pncclMake: declared"],
    ),
    (
        "an_argument_more",
        ["int root", "int root, int more"],
        &["ncclMake: declared", "pncclMake: declared"],
    ),
    (
        "an_argument_that_may_be_written",
        ["const void* from", "void* from"],
        &["ncclMake: declared", "pncclMake: declared"],
    ),
    (
        "a_pointer_to_a_pointer",
        ["const ncclThing_t thing", "ncclThing_t* thing"],
        &["ncclName: declared"],
    ),
    ("another_result", ["const char* ncclName", "char* ncclName"], &["ncclName: declared"]),
    (
        "a_function_more_which_nobody_calls",
        ["void ncclSay(void);", "void ncclSay(void); int ncclNew();"],
        &[],
    ),
    (
        "a_function_less",
        ["const char* ncclName(const ncclThing_t thing);", ""],
        &["ncclName: declared (since"],
    ),
    (
        "a_macro_that_is_declared_as_newer",
        ["#define NCCL_LESS -1", "#define NCCL_LESS -1\n#define NCCL_LATER 1"],
        &["NCCL_LATER: declared as newer"],
    ),
    (
        "another_number_in_an_enum",
        ["1 << 1", "1"],
        &["ncclBad: declared 2, in the header Some(1.0)"],
    ),
    (
        "a_number_more_in_an_enum",
        ["1 << 1,", "1 << 1, ncclWorse = 3,"],
        &["ncclWorse: neither declared nor an exception"],
    ),
    (
        "a_number_of_another_enum",
        ["ncclState_t;\n", "ncclOther_t;\n"],
        &["ncclGood: declared 0, in the header None", "ncclBad: declared 2"],
    ),
    ("another_number_of_a_macro", ["0x10", "0x11"], &["NCCL_MAGIC: declared 16"]),
    (
        "a_macro_less",
        ["#define NCCL_LESS -1", ""],
        &["NCCL_LESS: declared (since 2.24.3)", "NCCL_LESS: declared -1"],
    ),
    (
        "fields_in_another_order",
        ["size_t size;\n  unsigned int version;", "unsigned int version; size_t size;"],
        &["ncclOptions_t: declared"],
    ),
    (
        "a_field_of_another_type",
        ["unsigned int version", "uint64_t version"],
        &["ncclOptions_t: declared"],
    ),
    ("a_field_more", ["int count;", "int count; int more;"], &["ncclOptions_t: declared"]),
    (
        "a_field_that_starts_otherwise",
        ["NULL, NCCL_UNSET", "NULL, NCCL_LESS"],
        &["NCCL_OPTIONS_INITIALIZER: declared"],
    ),
    (
        "the_version_written_as_of_old",
        ["NCCL_VERSION_CODE, \\", "NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR), \\"],
        &[],
    ),
    (
        "an_initializer_of_another_struct",
        ["sizeof(ncclOptions_t)", "sizeof(ncclOther_t)"],
        &["ncclOptions_t: the header has no initializer of it"],
    ),
    ("a_handle_less", ["typedef struct ncclThing* ncclThing_t;", ""], &["ncclThing_t: declared"]),
    ("a_struct_less", ["} ncclOptions_t;", "} ncclNew_t;"], &["ncclOptions_t: declared"]),
];

/// A trial for each mistake, and one for texts that are not headers.
pub(crate) fn trials() -> Vec<Trial> {
    let trial = |mistake: &'static Mistake| {
        Trial::test(format!("a_header_with_{}", mistake.0), || find(mistake))
    };
    let mut trials: Vec<Trial> = MISTAKES.iter().map(trial).collect();
    trials.push(Trial::test("what_is_not_understood_is_an_error", not_understood));
    trials
}

fn find((_, [what, by], expected): &Mistake) -> Result<(), Failed> {
    if !HEADER.contains(what) {
        return Err(format!("the header does not have {what:?}").into());
    }
    let header = if what.is_empty() { HEADER.to_owned() } else { HEADER.replace(what, by) };
    let header = Header::parse(&header)?;
    let version = header.version()?;
    let check = Check { header: &header, declared: &DECLARED, exceptions: EXCEPTIONS, version };
    let said = check.problems();
    let all = said.len() == expected.len()
        && expected.iter().all(|start| said.iter().any(|problem| problem.starts_with(start)));
    if all { Ok(()) } else { Err(format!("expected {expected:?}, said {said:#?}").into()) }
}

/// The parser must not skip a statement that it does not know.
fn not_understood() -> Result<(), Failed> {
    for header in [
        "int ncclF(int (*callback)(int));",
        "int ncclF(const int* const* x);",
        "long long ncclF();",
        "typedef union { int i; } ncclU;",
        "/* no end",
        "int ncclF(); }; int x",
    ] {
        if let Ok(header) = Header::parse(header) {
            return Err(format!("taken for a header: {header:?}").into());
        }
    }
    Ok(())
}
