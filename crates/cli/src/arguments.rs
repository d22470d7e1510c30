//! Turns arguments, variables and a file into settings, with the table of options. Reports every mistake, not the first.
//!
//! A parser of its own, because a library stops at the first mistake and cannot answer flags of other programs.

use std::collections::BTreeMap;
use std::fmt;

use tf_model::deepseek_v41::engram_rows::EngramPlace;
use tf_text::chat::openai::{EFFORTS, parse_effort};

use crate::options::{
    Alias, Answer, Command, DefaultValue, Environment, Form, Kind, OPTIONS, OptionSpec, PASTED, PREFIX, Pasted,
    SECOND_WAVE_FLAGS, find, other_build,
};

/// Cache of `--engram disk` where nobody gives its size.
const ENGRAM_CACHE_BYTES: u64 = 256 << 20;

/// A checked value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    On(bool),
    Auto,
    Count(u64),
    Integer(i64),
    Number(f64),
    Bytes(u64),
    Text(String),
    List(Vec<String>),
}

/// Who said it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Flag,
    Variable(String),
    File { file: String, line: usize },
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Flag => formatter.write_str("flag"),
            Source::Variable(name) => formatter.write_str(name),
            Source::File { file, line } => write!(formatter, "{file}:{line}"),
            Source::Default => formatter.write_str("default"),
        }
    }
}

/// An option's value and where it came from.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    pub value: Value,
    pub source: Source,
}

/// What the user asked for, before a model is looked at.
#[derive(Clone, Debug)]
pub struct Arguments {
    pub command: Command,
    pub positionals: Vec<String>,
    settings: BTreeMap<&'static str, Setting>,
    /// Flags that were accepted without effect, and variables that mean nothing.
    pub notes: Vec<String>,
}

/// Everything that was wrong with the arguments, a line each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct Mistakes(pub Vec<String>);

/// What the program was started for.
#[derive(Clone, Debug)]
pub enum Request {
    Help { command: Option<Command>, long: bool },
    Version,
    Run(Box<Arguments>),
}

/// Reads the arguments after the program's name.
///
/// # Errors
/// [`Mistakes`] with all of them: unknown and repeated flags, values out of range, wherever they came from.
pub fn parse(arguments: &[String], environment: &Environment) -> Result<Request, Mistakes> {
    let asks_help = |argument: &String| argument == "--help" || argument == "-h";
    match arguments.first().map(String::as_str) {
        Some("--version" | "-V") => return Ok(Request::Version),
        Some(word @ ("--help" | "-h")) => return Ok(Request::Help { command: None, long: word == "--help" }),
        Some(word) if word.starts_with('-') => {
            return Err(Mistakes(vec![format!("{word} stands before the command: put it behind")]));
        }
        _ => {}
    }
    let Some((name, rest)) = arguments.split_first() else {
        return Err(Mistakes(vec!["no command: `tensorfold --help` lists them".to_owned()]));
    };
    if name == "help" {
        let command = rest.first().map(|name| Command::parse(name)).transpose().map_err(|text| Mistakes(vec![text]))?;
        return Ok(Request::Help { command, long: true });
    }
    let command = Command::parse(name).map_err(|text| Mistakes(vec![text]))?;
    let options = rest.iter().take_while(|argument| *argument != "--");
    if let Some(argument) = options.clone().find(|argument| asks_help(argument)) {
        return Ok(Request::Help { command: Some(command), long: argument == "--help" });
    }
    let mut reader =
        Reader { command, positionals: Vec::new(), flags: BTreeMap::new(), notes: Vec::new(), mistakes: Vec::new() };
    reader.flags(rest);
    let settings = reader.settle(environment);
    match reader.mistakes.is_empty() {
        true => Ok(Request::Run(Box::new(Arguments {
            command,
            positionals: reader.positionals,
            settings,
            notes: reader.notes,
        }))),
        false => Err(Mistakes(reader.mistakes)),
    }
}

struct Reader {
    command: Command,
    positionals: Vec<String>,
    /// By flag: the values given, and the name each was given under.
    flags: BTreeMap<&'static str, Vec<(String, String)>>,
    notes: Vec<String>,
    mistakes: Vec<String>,
}

/// What a name on the command line stands for.
enum Meaning {
    Option(&'static OptionSpec, Form),
    /// `--no-name` of a toggle.
    Negated(&'static OptionSpec),
    Pasted(&'static Pasted),
    SecondWave,
    Unknown,
}

impl Reader {
    fn flags(&mut self, arguments: &[String]) {
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            if argument == "--" {
                self.positionals.extend(arguments.by_ref().cloned());
            } else if argument.starts_with('-') && argument.len() > 1 {
                self.flag(argument, &mut arguments);
            } else {
                self.positionals.push(argument.clone());
            }
        }
        let (found, most) = (self.positionals.len(), self.command.positionals_max());
        if found > most {
            let extra = self.positionals[most..].join(" ");
            let (usage, _) = self.command.help();
            self.mistakes.push(format!(
                "{extra}: more than `tensorfold {}` takes. Quote a text with spaces",
                format!("{} {usage}", self.command.name()).trim()
            ));
        }
    }

    fn flag(&mut self, argument: &str, rest: &mut std::slice::Iter<'_, String>) {
        let (name, inline) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument, None),
        };
        match self.meaning(name) {
            Meaning::Option(spec, form) => {
                let takes_value = match form {
                    Form::Same => spec.kind.takes_value() || spec.kind == Kind::Toggle && name != toggle(spec),
                    Form::Fixed(_) => false,
                    Form::Unit(_) => true,
                };
                let Some(value) = self.value(name, takes_value, inline, rest) else { return };
                let value = match form {
                    Form::Fixed(value) => value.to_owned(),
                    Form::Unit(unit) => format!("{value}{unit}"),
                    // `--device` names a backend, or numbers a device as other programs do.
                    Form::Same if name == "--device" && value.parse::<u64>().is_ok() => {
                        self.mistakes.push(format!("--device {value} has no effect on the cpu backend: leave it out"));
                        return;
                    }
                    Form::Same => value,
                };
                self.add(spec, name, value);
            }
            Meaning::Negated(spec) => {
                if self.value(name, false, inline, rest).is_some() {
                    self.add(spec, name, "off".to_owned());
                }
            }
            Meaning::Pasted(pasted) => self.answer(pasted, name, inline, rest),
            Meaning::SecondWave => {
                self.value(name, inline.is_some(), inline, rest);
                self.mistakes.push(format!("{name} is not built yet: leave it out"));
            }
            Meaning::Unknown => {
                // A value of an unknown flag must not become a model's name.
                if inline.is_none() && rest.as_slice().first().is_some_and(|next| !next.starts_with('-')) {
                    rest.next();
                }
                let command = self.command;
                let hint =
                    nearest(name, names(command)).map_or_else(String::new, |near| format!(" Did you mean {near}?"));
                let owner = OPTIONS.iter().find(|spec| named(spec, name).is_some());
                self.mistakes.push(match owner {
                    Some(spec) => {
                        let commands: Vec<_> = spec.commands.iter().map(|command| command.name()).collect();
                        format!("{name} is not an option of {}; it belongs to {}", command.name(), commands.join(", "))
                    }
                    None => format!("{name} is not an option of {}.{hint}", command.name()),
                });
            }
        }
    }

    fn meaning(&self, name: &str) -> Meaning {
        for spec in OPTIONS.iter().filter(|spec| spec.commands.contains(&self.command)) {
            if let Some(form) = named(spec, name) {
                return Meaning::Option(spec, form);
            }
            if spec.kind == Kind::Toggle && name.strip_prefix("--no-") == Some(spec.flag) {
                return Meaning::Negated(spec);
            }
        }
        let matches = |pasted: &&Pasted| match pasted.name.strip_suffix('*') {
            Some(stem) => name.starts_with(stem),
            None => pasted.name == name,
        };
        match PASTED.iter().find(matches) {
            Some(pasted) => Meaning::Pasted(pasted),
            None if SECOND_WAVE_FLAGS.contains(&name) => Meaning::SecondWave,
            None => Meaning::Unknown,
        }
    }

    /// The value behind a name: after `=`, or the next argument. A flag without a value yields an empty one.
    fn value(
        &mut self,
        name: &str,
        takes_value: bool,
        inline: Option<String>,
        rest: &mut std::slice::Iter<'_, String>,
    ) -> Option<String> {
        match (takes_value, inline) {
            (true, Some(value)) => Some(value),
            (true, None) => {
                let value = rest.as_slice().first().filter(|next| !next.starts_with("--") || next.len() == 2);
                match value {
                    Some(value) => {
                        rest.next();
                        Some(value.clone())
                    }
                    None => {
                        self.mistakes.push(format!("{name} needs a value"));
                        None
                    }
                }
            }
            (false, None) => Some("on".to_owned()),
            (false, Some(value)) => {
                self.mistakes.push(format!("{name}={value}: this flag takes no value"));
                None
            }
        }
    }

    fn add(&mut self, spec: &'static OptionSpec, name: &str, value: String) {
        let given = self.flags.entry(spec.flag).or_default();
        if let Some((other, _)) = given.first()
            && !spec.repeatable
        {
            let text = match other == name {
                true => format!("{name} is given twice: once is enough"),
                false => format!("{other} and {name} are the same option: use one of them"),
            };
            self.mistakes.push(text);
            return;
        }
        given.push((name.to_owned(), value));
    }

    fn answer(
        &mut self,
        pasted: &'static Pasted,
        name: &str,
        inline: Option<String>,
        rest: &mut std::slice::Iter<'_, String>,
    ) {
        // A switch elsewhere may be given bare here.
        let bare = name == "--enable-expert-parallel" && inline.is_none();
        let takes_value = pasted.takes_value && !bare || inline.is_some();
        // Which of them take values differs between programs; a bare one is refused all the same.
        let refused = matches!(pasted.answer, Answer::Refused(_));
        let next_is_value =
            rest.as_slice().first().is_some_and(|next| !next.starts_with('-') || next.parse::<f64>().is_ok());
        let value = match refused && inline.is_none() && !next_is_value {
            true => String::new(),
            false => match self.value(name, takes_value, inline, rest) {
                Some(value) => value,
                None => return,
            },
        };
        match pasted.answer {
            Answer::NoEffect => self.notes.push(format!("{name} has no effect here")),
            Answer::Values(allowed, _) if allowed.contains(&value.as_str()) => {
                self.notes.push(format!("{name} {value} has no effect here: it is what is done anyway"));
            }
            Answer::Values(_, reason) if bare => self.mistakes.push(format!("{name} is refused: {reason}")),
            Answer::Values(_, reason) => self.mistakes.push(format!("{name} {value} is refused: {reason}")),
            Answer::Refused(reason) => self.mistakes.push(format!("{name} is refused: {reason}")),
        }
    }

    /// Chooses for each option the value that counts, and checks it.
    fn settle(&mut self, environment: &Environment) -> BTreeMap<&'static str, Setting> {
        let file = self.read_file(environment);
        let mut settings = BTreeMap::new();
        for spec in OPTIONS.iter().filter(|spec| spec.commands.contains(&self.command)) {
            let variable = spec.variable(self.command);
            let (texts, source, shown) = if let Some(given) = self.flags.get(spec.flag) {
                let shown = given[0].0.clone();
                (given.iter().map(|(_, value)| value.clone()).collect(), Source::Flag, shown)
            } else if let Some(value) = environment.get(&variable) {
                let values = match spec.repeatable {
                    true => value.split(',').map(|part| part.trim().to_owned()).collect(),
                    false => vec![value.to_owned()],
                };
                (values, Source::Variable(variable.clone()), variable)
            } else if let Some((values, source)) = file.get(spec.flag) {
                (values.clone(), source.clone(), format!("{source} {}", spec.flag))
            } else {
                if let DefaultValue::Is(text) = spec.default
                    && spec.later.is_empty()
                {
                    let value = parse_value(spec.kind, text).expect("the table's defaults are values of their options");
                    settings.insert(spec.flag, Setting { value, source: Source::Default });
                }
                continue;
            };
            if !spec.later.is_empty() {
                self.mistakes.push(format!("{shown} is refused: {}", spec.later));
                continue;
            }
            let mut values = Vec::new();
            for text in &texts {
                // Another name of the reasoning switch takes a template's arguments.
                let kind = match shown.ends_with("chat-template-kwargs") {
                    true => Kind::TemplateArguments,
                    false => spec.kind,
                };
                match parse_value(kind, text) {
                    Ok(value) => values.push(value),
                    Err(expected) => {
                        let found = if spec.secret { "(hidden)" } else { text.as_str() };
                        self.mistakes.push(format!("{shown} {found}: expected {expected}"));
                    }
                }
            }
            let value = match spec.repeatable {
                true => Value::List(texts),
                false => match values.pop() {
                    Some(value) => value,
                    None => continue,
                },
            };
            settings.insert(spec.flag, Setting { value, source });
        }
        self.note_unknown_variables(environment);
        settings
    }

    fn note_unknown_variables(&mut self, environment: &Environment) {
        let known: Vec<String> = OPTIONS.iter().flat_map(variables).collect();
        for name in environment.names().filter(|name| name.starts_with(PREFIX)) {
            if known.iter().any(|known| known == name) {
                continue;
            }
            let flag = name[PREFIX.len()..].to_lowercase().replace('_', "-");
            let meant: Vec<String> =
                OPTIONS.iter().filter(|spec| named(spec, &format!("--{flag}")).is_some()).flat_map(variables).collect();
            let hint = match (meant.is_empty(), nearest(name, known.iter().map(String::as_str))) {
                (false, _) => format!(" It is called {}.", meant.join(" or ")),
                (true, Some(near)) => format!(" Did you mean {near}?"),
                (true, None) => String::new(),
            };
            self.notes.push(format!("{name} is no variable of this program and is not read.{hint}"));
        }
    }

    /// The file that `--config` names: for each flag its values and their place.
    fn read_file(&mut self, environment: &Environment) -> BTreeMap<&'static str, (Vec<String>, Source)> {
        let mut found = BTreeMap::new();
        let flag = self.flags.get("config").map(|given| given[0].1.clone());
        let Some(path) = flag.or_else(|| environment.get(&format!("{PREFIX}CONFIG")).map(str::to_owned)) else {
            return found;
        };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => {
                self.mistakes.push(format!("--config {path}: {error}"));
                return found;
            }
        };
        let table: toml::Table = match text.parse() {
            Ok(table) => table,
            Err(error) => {
                self.mistakes.push(format!("--config {path}: {}", error.to_string().trim_end()));
                return found;
            }
        };
        for (key, value) in &table {
            let line = line_of(&text, key);
            match (value, Command::ALL.into_iter().find(|command| command.name() == key)) {
                // What stands below a command's name counts for that command, and more than what stands above.
                (toml::Value::Table(own), Some(command)) => {
                    let is_mine = command == self.command;
                    for (key, value) in own.iter().filter(|_| is_mine) {
                        let line = line + line_of(text.lines().skip(line).collect::<Vec<_>>().join("\n").as_str(), key);
                        let setting = self.file_setting(&path, line, key, value, true);
                        found.extend(setting);
                    }
                }
                _ => {
                    if let Some((flag, setting)) = self.file_setting(&path, line, key, value, false) {
                        found.entry(flag).or_insert(setting);
                    }
                }
            }
        }
        found
    }

    /// One key of the file, where it is an option of this command. `is_own`: it stands below the command's name.
    fn file_setting(
        &mut self,
        path: &str,
        line: usize,
        key: &str,
        value: &toml::Value,
        is_own: bool,
    ) -> Option<(&'static str, (Vec<String>, Source))> {
        let place = format!("{path}:{line}");
        let Some(values) = scalars(value) else {
            self.mistakes.push(format!("{place} {key}: expected a text, a number, true or false, or a list of them"));
            return None;
        };
        let flag = key.replace('_', "-");
        let Some(spec) = find(self.command, &flag) else {
            // A file may serve several commands, so another command's key is fine.
            if is_own || !OPTIONS.iter().any(|spec| spec.flag == flag) {
                let hint = nearest(&flag, OPTIONS.iter().map(|spec| spec.flag)).filter(|near| *near != flag);
                let hint = hint.map_or_else(String::new, |near| format!(" Did you mean {near}?"));
                let whose = if is_own { format!(" of {}", self.command.name()) } else { String::new() };
                self.mistakes.push(format!("{place} {key} is no option{whose}.{hint}"));
            }
            return None;
        };
        if spec.is_scoped() && !is_own {
            let commands: Vec<String> = OPTIONS
                .iter()
                .filter(|spec| spec.flag == flag)
                .flat_map(|spec| spec.commands.iter().map(|command| format!("[{}]", command.name())))
                .collect();
            self.mistakes.push(format!(
                "{place} {key} means different things to different commands: write it below {}",
                commands.join(" or ")
            ));
            return None;
        }
        if !(spec.repeatable || spec.kind == Kind::List || values.len() == 1) {
            self.mistakes.push(format!("{place} {key}: expected one value, not a list"));
            return None;
        }
        let values = if spec.kind == Kind::List { vec![values.join(",")] } else { values };
        Some((spec.flag, (values, Source::File { file: path.to_owned(), line })))
    }
}

/// The variables that an option is read from, whatever the command.
fn variables(spec: &OptionSpec) -> Vec<String> {
    let mut variables: Vec<String> = spec.commands.iter().map(|command| spec.variable(*command)).collect();
    variables.dedup();
    variables
}

fn toggle(spec: &OptionSpec) -> String {
    format!("--{}", spec.flag)
}

/// In which form `name` is a name of `spec`, if it is one.
fn named(spec: &OptionSpec, name: &str) -> Option<Form> {
    if name.strip_prefix("--") == Some(spec.flag) {
        return Some(Form::Same);
    }
    spec.aliases.iter().find(|alias: &&Alias| alias.name == name).map(|alias| alias.form)
}

/// All names that a command understands.
fn names(command: Command) -> impl Iterator<Item = &'static str> {
    let options = OPTIONS.iter().filter(move |spec| spec.commands.contains(&command));
    let options =
        options.flat_map(|spec| std::iter::once(spec.flag).chain(spec.aliases.iter().map(|alias| alias.name)));
    options.chain(["help"])
}

fn scalars(value: &toml::Value) -> Option<Vec<String>> {
    match value {
        toml::Value::String(text) => Some(vec![text.clone()]),
        toml::Value::Integer(number) => Some(vec![number.to_string()]),
        toml::Value::Float(number) => Some(vec![number.to_string()]),
        toml::Value::Boolean(value) => Some(vec![if *value { "on" } else { "off" }.to_owned()]),
        toml::Value::Array(items) => items.iter().map(|item| scalars(item)?.pop()).collect(),
        toml::Value::Table(_) | toml::Value::Datetime(_) => None,
    }
}

fn line_of(text: &str, key: &str) -> usize {
    let starts = |line: &str| {
        let line = line.trim_start();
        line.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='))
            || line.trim_end() == format!("[{key}]")
    };
    text.lines().position(starts).map_or(1, |index| index + 1)
}

/// Reads a value of a kind.
///
/// # Errors
/// What was expected, for the end of "NAME VALUE: expected ...".
pub fn parse_value(kind: Kind, text: &str) -> Result<Value, String> {
    let within = |value: u64, least: u64, most: u64| (least..=most).contains(&value).then_some(Value::Count(value));
    let range = |least: u64, most: u64| format!("a whole number from {least} to {most}");
    match kind {
        Kind::Switch | Kind::Toggle => switch(text).map(Value::On).ok_or_else(|| "on or off".to_owned()),
        Kind::Text | Kind::File | Kind::Folder => match text.is_empty() {
            true => Err("a text that isn't empty".to_owned()),
            false => Ok(Value::Text(text.to_owned())),
        },
        Kind::Count { least, most } => {
            count(text).and_then(|value| within(value, least, most)).ok_or_else(|| range(least, most))
        }
        Kind::CountOrAuto { .. } if text == "auto" => Ok(Value::Auto),
        Kind::CountOrAuto { least, most } => count(text)
            .and_then(|value| within(value, least, most))
            .ok_or_else(|| format!("{}, or auto", range(least, most))),
        Kind::Integer => text.parse().map(Value::Integer).map_err(|_| "a whole number of 64 bits".to_owned()),
        Kind::Number { least, most } => {
            number(text, least, most).map(Value::Number).ok_or_else(|| format!("a number from {least} to {most}"))
        }
        Kind::Size => {
            size(text).map(Value::Bytes).ok_or_else(|| "a size like 512MiB, 16g or 64GB, up to 2^60 bytes".to_owned())
        }
        Kind::SizeOrFraction => {
            let fraction = text.contains('.').then(|| number(text, 0.01, 1.0)).flatten();
            let value = fraction.map(Value::Number).or_else(|| size(text).map(Value::Bytes));
            value.ok_or_else(|| "a size like 16GiB, or a share from 0.01 to 1.0".to_owned())
        }
        Kind::Choice { built, later } => {
            let word = text.split(':').next().unwrap_or(text);
            if built.contains(&text) {
                Ok(Value::Text(text.to_owned()))
            } else if later.contains(&word) {
                let reason = other_build(word).map_or_else(|| format!("{word} is not built yet"), str::to_owned);
                Err(format!("{}: {reason}", built.join(" or ")))
            } else {
                Err(built.join(" or "))
            }
        }
        Kind::OnOffCount { most } => match switch(text) {
            Some(value) if count(text).is_none() => Ok(Value::On(value)),
            _ => count(text)
                .and_then(|value| within(value, 0, most))
                .ok_or_else(|| format!("on, off, or a number of drafts up to {most}")),
        },
        Kind::Effort => match parse_effort(text) {
            Some(_) => Ok(Value::Text(text.to_owned())),
            None => Err(EFFORTS.replace('"', "")),
        },
        Kind::EngramPlace => match engram_place(text) {
            Some(_) => Ok(Value::Text(text.to_owned())),
            None => Err("mmap, ram, disk, or disk with the size of its cache like disk:4GiB".to_owned()),
        },
        Kind::List => {
            let parts: Vec<String> = text.split(',').map(|part| part.trim().to_owned()).collect();
            match parts.iter().any(String::is_empty) {
                true => Err("a list with commas".to_owned()),
                false => Ok(Value::List(parts)),
            }
        }
        Kind::TemplateArguments => template_arguments(text),
    }
}

/// The word of `--engram`, and the bytes of its cache where it is disk.
pub fn engram_place(text: &str) -> Option<EngramPlace> {
    match text.split_once(':') {
        None if text == "mmap" => Some(EngramPlace::Mapped),
        None if text == "ram" => Some(EngramPlace::Ram),
        None if text == "disk" => Some(EngramPlace::Disk { cache_bytes: ENGRAM_CACHE_BYTES }),
        Some(("disk", cache)) => size(cache).map(|cache_bytes| EngramPlace::Disk { cache_bytes }),
        _ => None,
    }
}

fn switch(text: &str) -> Option<bool> {
    match text {
        "on" | "true" | "yes" | "1" => Some(true),
        "off" | "false" | "no" | "0" => Some(false),
        _ => None,
    }
}

/// `{"thinking": false}` or `{"enable_thinking": false}`; another key would be ignored, so it is refused.
fn template_arguments(text: &str) -> Result<Value, String> {
    let expected = || "an object with thinking alone, like {\"thinking\": false}".to_owned();
    let object: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).map_err(|_| expected())?;
    match object.iter().collect::<Vec<_>>()[..] {
        [(key, value)] if key == "thinking" || key == "enable_thinking" => {
            value.as_bool().map(Value::On).ok_or_else(expected)
        }
        _ => Err(expected()),
    }
}

/// `32k` is 32 * 1024, `1M` 1024 * 1024.
fn count(text: &str) -> Option<u64> {
    let (digits, factor) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1 << 10),
        None => match text.strip_suffix(['m', 'M']) {
            Some(digits) => (digits, 1 << 20),
            None => (text, 1),
        },
    };
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|_| plain)?.checked_mul(factor)
}

fn number(text: &str, least: f64, most: f64) -> Option<f64> {
    text.parse::<f64>().ok().filter(|number| (least..=most).contains(number))
}

/// Sizes beyond are nobody's; below, sums of a few stay far from the end of 64 bits.
const SIZE_MAX: u64 = 1 << 60;

/// Bytes, at most [`SIZE_MAX`]: `KiB`, `k` and the like are binary, `KB` and the like decimal.
fn size(text: &str) -> Option<u64> {
    any_size(text).filter(|bytes| *bytes <= SIZE_MAX)
}

fn any_size(text: &str) -> Option<u64> {
    let split = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let (letter, rest) = match unit.chars().next() {
        None => return digits.parse().ok(),
        Some(letter) => (letter.to_ascii_lowercase(), unit[letter.len_utf8()..].to_ascii_lowercase()),
    };
    let power = match letter {
        'b' if rest.is_empty() => return digits.parse().ok(),
        'k' => 1,
        'm' => 2,
        'g' => 3,
        't' => 4,
        _ => return None,
    };
    let base: u64 = match rest.as_str() {
        "" | "ib" | "i" => 1024,
        "b" => 1000,
        _ => return None,
    };
    let scaled = digits.parse::<f64>().ok()? * base.pow(power) as f64;
    Some(scaled as u64)
}

/// The name that `wrong` was probably meant to be.
pub fn nearest<'a>(wrong: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    let bare = wrong.trim_start_matches('-');
    let rated = names.map(|name| (distance(bare, name.trim_start_matches('-')), name));
    // A third of the letters may differ; more is another word.
    let (_, name) =
        rated.filter(|(edits, _)| *edits * 3 <= bare.chars().count().max(3)).min_by_key(|(edits, _)| *edits)?;
    Some(match wrong.starts_with('-') && !name.starts_with('-') {
        true => format!("--{name}"),
        false => name.to_owned(),
    })
}

/// Letters to insert, remove, change, or swap with their neighbour.
fn distance(left: &str, right: &str) -> usize {
    let (left, right): (Vec<char>, Vec<char>) = (left.chars().collect(), right.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (index, letter) in left.iter().enumerate() {
        let mut next = vec![index + 1];
        for (column, other) in right.iter().enumerate() {
            let replaced = row[column] + usize::from(letter != other);
            let mut edits = replaced.min(row[column + 1] + 1).min(next[column] + 1);
            if index > 0 && column > 0 && *letter == right[column - 1] && left[index - 1] == *other {
                edits = edits.min(before[column - 1] + 1);
            }
            next.push(edits);
        }
        before = std::mem::replace(&mut row, next);
    }
    row[right.len()]
}

impl Arguments {
    /// An option's value and source. `None`: not set, and the default isn't a plain value.
    pub fn setting(&self, flag: &str) -> Option<&Setting> {
        debug_assert!(find(self.command, flag).is_some(), "--{flag} is not an option of {}", self.command.name());
        self.settings.get(flag)
    }

    /// The same without an option, as if nobody had said it.
    pub fn without(&self, flag: &str) -> Arguments {
        let mut arguments = self.clone();
        arguments.settings.remove(flag);
        arguments
    }

    /// Whether someone other than the table said it.
    pub fn is_given(&self, flag: &str) -> bool {
        self.setting(flag).is_some_and(|setting| setting.source != Source::Default)
    }

    pub fn is_on(&self, flag: &str) -> bool {
        match self.setting(flag).map(|setting| &setting.value) {
            Some(Value::On(value)) => *value,
            Some(Value::Text(text)) => text == "on",
            _ => false,
        }
    }

    pub fn count(&self, flag: &str) -> Option<u64> {
        match self.setting(flag)?.value {
            Value::Count(count) => Some(count),
            _ => None,
        }
    }

    pub fn number(&self, flag: &str) -> Option<f64> {
        match self.setting(flag)?.value {
            Value::Number(number) => Some(number),
            _ => None,
        }
    }

    pub fn integer(&self, flag: &str) -> Option<i64> {
        match self.setting(flag)?.value {
            Value::Integer(number) => Some(number),
            _ => None,
        }
    }

    pub fn bytes(&self, flag: &str) -> Option<u64> {
        match self.setting(flag)?.value {
            Value::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    pub fn text(&self, flag: &str) -> Option<&str> {
        match &self.setting(flag)?.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn list(&self, flag: &str) -> Option<&[String]> {
        match &self.setting(flag)?.value {
            Value::List(items) => Some(items),
            _ => None,
        }
    }
}

/// A value as a user would write it.
pub fn show(value: &Value) -> String {
    match value {
        Value::On(true) => "on".to_owned(),
        Value::On(false) => "off".to_owned(),
        Value::Auto => "auto".to_owned(),
        Value::Count(count) | Value::Bytes(count) => count.to_string(),
        Value::Integer(number) => number.to_string(),
        Value::Number(number) => number.to_string(),
        Value::Text(text) => text.clone(),
        Value::List(items) => items.join(","),
    }
}

#[cfg(test)]
mod tests;
