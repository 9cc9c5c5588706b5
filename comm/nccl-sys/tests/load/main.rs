//! Tests which library is loaded, and the errors for libraries that cannot be loaded.
//!
//! Most tests use libraries that are built here and imitate NCCL (`imitations`). The test that needs NCCL itself is
//! ignored without it, with the reason. No test needs a GPU. Child processes read the environment.

mod imitations;
#[path = "../places/mod.rs"]
mod places;

use std::env;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::Command;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use nccl_sys::{Error, Nccl, Version, ncclResult_t};

use crate::imitations::{Imitation, TESTED_ON};

/// Set for a child process, which prints the result of `Nccl::load`.
const ROLE: &str = "NCCL_SYS_CHILD";

fn main() {
    if env::var_os(ROLE).is_some() {
        return tell();
    }
    let arguments = Arguments::from_args();
    let mut trials = vec![
        Trial::ignorable_test("nccl_itself_says_its_version", nccl_itself),
        Trial::test("missing_libraries_are_listed_with_reasons", missing),
        Trial::test("an_empty_name_is_no_library", empty),
        Trial::test("the_variable_names_the_only_library", variable),
    ];
    if TESTED_ON {
        trials.extend(with_imitations());
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn with_imitations() -> Vec<Trial> {
    vec![
        Trial::test("a_library_that_is_not_nccl_is_refused", not_nccl),
        Trial::test("an_old_library_is_refused_with_both_versions", old),
        Trial::test("a_library_without_a_function_is_refused", incomplete),
        Trial::test("a_library_without_a_version_is_refused", no_version),
        Trial::test("the_oldest_library_is_loaded", oldest),
        Trial::test("functions_outlive_what_found_them", outlive),
        Trial::test("the_system_finds_libnccl_so_2_first", first_name),
    ]
}

fn load(names: &[&Path]) -> Result<Nccl, Error> {
    // SAFETY: NC-1, they are NCCL, imitations of it, or have none of its names.
    unsafe { Nccl::load_from(names) }
}

fn nccl_itself() -> Result<Completion, Failed> {
    let variable = "HSDP_NCCL_LIBRARY";
    let file = "lib/libnccl.so.2";
    let Some(path) = places::find(variable, file) else {
        return Ok(Completion::ignored_with(places::missing(variable, file)));
    };
    let nccl = load(&[&path])?;
    assert!(nccl.version() >= Version::OLDEST, "{}", nccl.version());
    assert_eq!(nccl.version(), asked(&nccl));
    Ok(Completion::Completed)
}

/// The version that `ncclGetVersion` reports.
fn asked(nccl: &Nccl) -> Version {
    let get_version = nccl.functions().ncclGetVersion;
    let mut code = 0;
    // SAFETY: NC-2, it writes an int to where it is told to.
    let status = unsafe { get_version(&raw mut code) };
    assert_eq!(status, ncclResult_t::ncclSuccess);
    Version::from_code(code.try_into().expect("a version is positive"))
}

fn missing() -> Result<(), Failed> {
    let names = ["libabsent.so.2", "not/here/libabsent.so"].map(Path::new);
    let Err(error) = load(&names) else { return Err("it was loaded".into()) };
    let Error::NotFound { tried } = &error else { return Err(error.to_string().into()) };
    let libraries: Vec<&Path> = tried.iter().map(|attempt| attempt.library.as_path()).collect();
    assert_eq!(libraries, names);
    let said = error.to_string();
    for attempt in tried {
        assert!(!attempt.reason.is_empty());
        assert!(said.contains(&attempt.reason), "{said}");
        assert!(said.contains(&attempt.library.display().to_string()), "{said}");
    }
    assert_eq!(
        load(&[]).map(|_| ()).map_err(|error| error.to_string()),
        Err("NCCL cannot be loaded: no library was named".to_owned())
    );
    Ok(())
}

fn empty() -> Result<(), Failed> {
    let said = load(&[Path::new("")]).map(|_| ()).map_err(|error| error.to_string());
    assert_eq!(said, Err("NCCL cannot be loaded: : an empty name".to_owned()));
    Ok(())
}

/// No other library is tried, also if NCCL is installed.
fn variable() -> Result<(), Failed> {
    let said = child(&[("HSDP_NCCL_LIBRARY", Path::new("not/here/libnccl.so.2"))])?;
    assert!(said.starts_with("NCCL cannot be loaded: not/here/libnccl.so.2: "), "{said}");
    assert!(!said.contains("; libnccl.so"), "{said}");
    Ok(())
}

fn not_nccl() -> Result<(), Failed> {
    let library = Imitation::new("pub fn nothing() {}")?;
    let Err(error) = load(&[library.path()]) else { return Err("it was loaded".into()) };
    let said = error.to_string();
    let start = format!("{} has no function ncclGetVersion: ", library.path().display());
    assert!(said.contains(&start), "{said}");
    assert!(matches!(error, Error::MissingFunction { symbol: "ncclGetVersion", .. }), "{error:?}");
    Ok(())
}

fn old() -> Result<(), Failed> {
    let library = Imitation::of_version(21_701)?;
    let said = load(&[library.path()]).map(|_| ()).map_err(|error| error.to_string());
    let path = library.path().display();
    let expected =
        format!("NCCL cannot be used: {path} is version 2.17.1, at least 2.18.0 is needed");
    assert_eq!(said, Err(expected));
    Ok(())
}

fn incomplete() -> Result<(), Failed> {
    let library = Imitation::of_version(21_801)?;
    let Err(error) = load(&[library.path()]) else { return Err("it was loaded".into()) };
    let Error::MissingFunction { library: path, symbol, .. } = &error else {
        return Err(error.to_string().into());
    };
    assert_eq!(path, library.path());
    assert!(error.to_string().contains(symbol) && symbol.starts_with("nccl"), "{error}");
    Ok(())
}

fn no_version() -> Result<(), Failed> {
    for (status, code) in [(3, 23_203), (0, 0), (0, -1)] {
        let library = Imitation::answering(status, code)?;
        let Err(error) = load(&[library.path()]) else { return Err("it was loaded".into()) };
        let expected = Error::NoVersion {
            library: library.path().to_owned(),
            status: ncclResult_t(status),
            code,
        };
        assert_eq!(error, expected);
    }
    Ok(())
}

fn oldest() -> Result<(), Failed> {
    let library = Imitation::complete(21_801)?;
    let nccl = load(&[Path::new("libabsent.so.2"), library.path()])?;
    assert_eq!(nccl.version(), Version::new(2, 18, 1));
    assert_eq!(nccl.library(), library.path());
    assert_eq!(nccl.config().version, 21_801);
    assert!(nccl.config().size < size_of_val(&nccl.config()));
    Ok(())
}

fn outlive() -> Result<(), Failed> {
    let library = Imitation::complete(22_105)?;
    let nccl = load(&[library.path()])?;
    let functions = *nccl.functions();
    drop(nccl);
    let mut code = 0;
    // SAFETY: NC-3, the library is still there.
    let status = unsafe { (functions.ncclGetVersion)(&raw mut code) };
    assert_eq!((status, code), (ncclResult_t::ncclSuccess, 22_105));
    Ok(())
}

/// First both names are in one folder, then only the second.
fn first_name() -> Result<(), Failed> {
    let newer = Imitation::complete(22_203)?;
    let older = Imitation::complete(22_105)?;
    let folder = newer.folder();
    newer.copy_to(&folder.join("libnccl.so.2"))?;
    older.copy_to(&folder.join("libnccl.so"))?;
    let at = [("LD_LIBRARY_PATH", folder)];
    assert_eq!(child(&at)?, "2.22.3 from libnccl.so.2, twice the same");
    std::fs::remove_file(folder.join("libnccl.so.2"))?;
    if the_system_has_none()? {
        assert_eq!(child(&at)?, "2.21.5 from libnccl.so, twice the same");
    }
    let by_variable = [("LD_LIBRARY_PATH", folder), ("HSDP_NCCL_LIBRARY", newer.path())];
    let expected = format!("2.22.3 from {}, twice the same", newer.path().display());
    assert_eq!(child(&by_variable)?, expected);
    Ok(())
}

fn the_system_has_none() -> Result<bool, Failed> {
    Ok(child(&[("LD_LIBRARY_PATH", Path::new("not/here"))])?.contains("libnccl.so.2: "))
}

/// The result of `Nccl::load`, and whether a second call returns the same.
fn tell() {
    let said = match (Nccl::load(), Nccl::load()) {
        (Ok(one), Ok(other)) => {
            let same = if std::ptr::eq(one, other) { "twice the same" } else { "two of them" };
            format!("{} from {}, {same}", one.version(), one.library().display())
        }
        (one, other) => {
            let error = one.map_or_else(|error| error.to_string(), |_| "loaded".to_owned());
            if other.is_ok() { format!("{error}, then loaded") } else { error }
        }
    };
    let _ = io::stdout().write_all(said.as_bytes());
}

/// The output of a child with these variables, without those of the process that runs the tests.
fn child(variables: &[(&str, &Path)]) -> Result<String, Failed> {
    let mut command = Command::new(env::current_exe()?);
    command.env_remove("HSDP_NCCL_LIBRARY").env_remove("LD_LIBRARY_PATH").env(ROLE, "1");
    command.envs(variables.iter().copied());
    let output = command.output()?;
    assert!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}
