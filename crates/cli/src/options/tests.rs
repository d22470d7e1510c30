use std::collections::HashSet;

use super::*;
use crate::arguments::parse_value;

#[test]
fn every_name_means_one_thing_in_a_command() {
    for command in Command::ALL {
        let mut names = HashSet::new();
        for spec in OPTIONS.iter().filter(|spec| spec.commands.contains(&command)) {
            assert!(names.insert(format!("--{}", spec.flag)), "{}: --{}", command.name(), spec.flag);
            for alias in spec.aliases {
                assert!(names.insert(alias.name.to_owned()), "{}: {}", command.name(), alias.name);
            }
        }
        for name in PASTED.iter().map(|pasted| pasted.name).chain(SECOND_WAVE_FLAGS.iter().copied()) {
            assert!(!names.contains(name), "{}: {name} is an option of ours", command.name());
        }
    }
}

#[test]
fn defaults_are_values_of_their_options() {
    let mut checked = 0;
    for spec in OPTIONS.iter().filter(|spec| spec.later.is_empty()) {
        if let DefaultValue::Is(value) = spec.default {
            assert!(parse_value(spec.kind, value).is_ok(), "--{} {value}", spec.flag);
            checked += 1;
        }
    }
    assert!(checked > 30, "{checked}");
}

#[test]
fn commands_have_one_spelling_and_refusals_say_why() {
    for (name, part) in [
        ("convert", "not offered: the release's own files are served"),
        ("plan", "not built yet; `info MODEL` shows the memory plan"),
        ("serv", "Did you mean serve?"),
        ("xyzzy", "xyzzy is not a command. `tensorfold --help`"),
    ] {
        let error = Command::parse(name).unwrap_err();
        assert!(error.contains(part), "{name}: {error}");
    }
    assert_eq!(Command::parse("ls"), Ok(Command::Models));
    assert_eq!(Command::parse("show"), Ok(Command::Info));
}

/// An option that no command asks for would be accepted and ignored.
#[test]
fn every_offered_option_is_read() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = String::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.ends_with(".rs") && !["options.rs", "reference.rs", "help.rs"].contains(&name.as_str()) {
            sources += &std::fs::read_to_string(&path).unwrap();
        }
    }
    // These commands are refused as a whole so far.
    let refused = [Command::Pull, Command::Selftest];
    for spec in OPTIONS.iter().filter(|spec| spec.later.is_empty()) {
        let offered = spec.commands.iter().any(|command| !refused.contains(command));
        let one_value = matches!(spec.kind, Kind::Choice { built, .. } if built.len() == 1);
        let read = sources.contains(&format!("\"{}\"", spec.flag));
        assert!(read || one_value || !offered, "--{} is offered and nothing reads it", spec.flag);
    }
}
