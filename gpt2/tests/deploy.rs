//! What `deploy` and the pages about launchers give a user to start from: manifests of the right shape, variables that the program reads, options
//! that it has, and pods that train.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};
use yaml_rust2::{Yaml, YamlLoader};

/// Variables that a launcher has set where a manifest refers to them.
const OF_LAUNCHERS: [&str; 3] = ["LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"];

/// The least time, in seconds, in which ranks that are asked to stop save the state of the run.
const LEAVING: u64 = 30;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn manifest(name: &str) -> Value {
    let documents = YamlLoader::load_from_str(&read(&format!("deploy/{name}"))).unwrap();
    assert_eq!(documents.len(), 1, "{name}");
    to_json(&documents[0])
}

fn to_json(yaml: &Yaml) -> Value {
    match yaml {
        Yaml::String(text) | Yaml::Real(text) => json!(text),
        Yaml::Integer(number) => json!(number),
        Yaml::Boolean(flag) => json!(flag),
        Yaml::Array(items) => items.iter().map(to_json).collect(),
        Yaml::Hash(fields) => {
            let field = |(name, value): (&Yaml, &Yaml)| (name.as_str().unwrap().to_owned(), to_json(value));
            Value::Object(fields.iter().map(field).collect())
        }
        Yaml::Null | Yaml::Alias(_) | Yaml::BadValue => Value::Null,
    }
}

/// The templates of a manifest's pods, with the number of pods of each.
fn pods(manifest: &Value) -> Vec<(u64, &Value)> {
    let spec = &manifest["spec"];
    let number = |value: &Value| value.as_u64().unwrap();
    match manifest["kind"].as_str().unwrap() {
        "JobSet" => {
            let job = &spec["replicatedJobs"][0]["template"]["spec"];
            assert_eq!(job["completionMode"], "Indexed");
            assert_eq!(job["completions"], job["parallelism"]);
            vec![(number(&job["completions"]), &job["template"]["spec"])]
        }
        "LeaderWorkerSet" => {
            let group = &spec["leaderWorkerTemplate"];
            vec![(number(&group["size"]), &group["workerTemplate"]["spec"])]
        }
        "PyTorchJob" => {
            let replicas = spec["pytorchReplicaSpecs"].as_object().unwrap().values();
            replicas.map(|replica| (number(&replica["replicas"]), &replica["template"]["spec"])).collect()
        }
        kind => panic!("{kind}"),
    }
}

const MANIFESTS: [&str; 3] = ["jobset.yaml", "leaderworkerset.yaml", "pytorchjob.yaml"];

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|item| item.as_str().unwrap()).collect()
}

/// The options of `gpt2 train` that a container is started with.
fn options(container: &Value) -> Vec<&str> {
    let command = texts(&container["command"]);
    assert!(command.join(" ").contains("gpt2 train"), "{command:?}");
    texts(&container["args"])
}

/// Whether the program takes these arguments: `--help`, which comes last, is only heeded where all before it are understood.
fn assert_understood(arguments: &[&str], place: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_gpt2")).args(arguments).arg("--help").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{place}: gpt2 {}: {said}", arguments.join(" "));
}

/// What the program reads from the environment, as its source has it.
fn variables() -> String {
    let core = root().join("comm-core/src");
    let mut files = vec![core.join("job.rs"), root().join("gpt2/src/env.rs")];
    files.extend(fs::read_dir(core.join("job")).unwrap().map(|entry| entry.unwrap().path()));
    files.retain(|path| path.is_file() && !path.ends_with("tests.rs"));
    files.iter().map(|path| fs::read_to_string(path).unwrap()).collect()
}

fn assert_read(name: &str, place: &str) {
    assert!(variables().contains(&format!("\"{name}\"")), "{place}: the program does not read {name}");
}

#[test]
fn manifests_start_the_program_as_it_is() {
    for name in MANIFESTS {
        let manifest = manifest(name);
        for (_, pod) in pods(&manifest) {
            assert!(pod["terminationGracePeriodSeconds"].as_u64().unwrap() > LEAVING, "{name}");
            let volumes: Vec<&Value> = pod["volumes"].as_array().unwrap().iter().collect();
            for container in pod["containers"].as_array().unwrap() {
                let options = options(container);
                assert_understood(&[&["train"][..], &options].concat(), name);
                for needed in ["--resume=auto", "--overwrite"] {
                    assert!(options.contains(&needed), "{name}: no {needed}");
                }
                for mount in container["volumeMounts"].as_array().unwrap() {
                    let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]);
                    let claim =
                        &volume.unwrap_or_else(|| panic!("{name}: {mount}"))["persistentVolumeClaim"]["claimName"];
                    assert_eq!(*claim, self::manifest("volume.yaml")["metadata"]["name"], "{name}");
                }
                check_ports(&options, container, name);
                check_variables(container, name);
            }
        }
    }
}

fn check_ports(options: &[&str], container: &Value, name: &str) {
    let metrics = options.iter().find_map(|option| option.strip_prefix("--metrics=")?.rsplit_once(':'));
    let open = container["ports"].as_array().map(|ports| ports[0]["containerPort"].to_string());
    assert_eq!(metrics.map(|(_, port)| port.to_owned()), open, "{name}");
}

fn check_variables(container: &Value, name: &str) {
    let create = "kubectl create secret generic gpt2-secret --from-literal=secret=";
    assert!(read("deploy/jobset.yaml").contains(create));
    for variable in container["env"].as_array().unwrap() {
        assert_read(variable["name"].as_str().unwrap(), name);
        let secret = &variable["valueFrom"]["secretKeyRef"];
        assert!(secret.is_null() || (secret["name"] == "gpt2-secret" && secret["key"] == "secret"), "{name}: {secret}");
        let value = variable["value"].as_str().unwrap_or_default();
        if let Some((_, rest)) = value.split_once("$(") {
            assert!(OF_LAUNCHERS.contains(&rest.split_once(')').unwrap().0), "{name}: {value}");
        }
    }
}

#[test]
fn the_job_set_knows_its_pods() {
    let manifest = manifest("jobset.yaml");
    let [(ranks, pod)] = pods(&manifest)[..] else { panic!() };
    let value = |name: &str| {
        let variables = pod["containers"][0]["env"].as_array().unwrap();
        variables.iter().find(|variable| variable["name"] == name).unwrap()["value"].as_str().unwrap()
    };
    assert_eq!(value("COMM_WORLD_SIZE"), ranks.to_string());
    let (set, job) = (&manifest["metadata"]["name"], &manifest["spec"]["replicatedJobs"][0]["name"]);
    let (set, job) = (set.as_str().unwrap(), job.as_str().unwrap());
    let (host, _) = value("COMM_ADDR").rsplit_once(':').unwrap();
    assert_eq!(host, format!("{set}-{job}-0-0.{set}"));
}

/// Every command of the program in the batch script and on the pages, and every variable that they set.
#[test]
fn scripts_and_pages_have_options_and_variables_that_there_are() {
    let mut commands = 0;
    for place in [
        "deploy/slurm.sbatch",
        "docs/src/clusters.md",
        "docs/src/slurm.md",
        "docs/src/mpirun.md",
        "docs/src/torchrun.md",
        "docs/src/kubernetes.md",
    ] {
        let text = read(place);
        for command in commands_of(&text) {
            let arguments: Vec<&str> = command.iter().map(String::as_str).collect();
            assert_understood(&arguments, place);
            commands += 1;
        }
        let words = text.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
        for variable in words.filter(|word| word.starts_with("COMM_") && word.len() > 5) {
            assert_read(variable, place);
        }
    }
    assert!(commands >= 6, "only {commands} commands were found");
}

/// The commands in a text that begin with `gpt2 train`, or submit the batch script, which hands its options on. Lines go on behind `\\`.
fn commands_of(text: &str) -> Vec<Vec<String>> {
    let text = text.replace("\\\n", " ");
    let code: String = match text.contains("```") {
        // Of a page, what is code of the shell.
        true => text.split("```sh\n").skip(1).filter_map(|block| block.split("```").next()).collect(),
        false => text,
    };
    let lines = code.lines().filter(|line| !line.trim_start().starts_with('#'));
    let options = lines
        .filter_map(|line| ["gpt2 train ", "slurm.sbatch "].iter().find_map(|start| Some(line.split_once(start)?.1)));
    let arguments = options.map(|options| {
        let options = options.split(['&', '|', ';', '>']).next().unwrap_or_default();
        let mut words = vec!["train".to_owned()];
        for word in options.split_whitespace() {
            match word.contains('$') {
                false => words.push(word.into()),
                // The shell replaces an option's value.
                true if words.last().is_some_and(|last| last.starts_with("--")) => words.push("something".into()),
                true => {}
            }
        }
        words
    });
    arguments.collect()
}

/// A network with an address beside loopback, and the names of the pods.
const POD: &str = "set -e
ip link set lo up
ip link add pod0 type veth peer name pod1
ip address add 10.90.0.1/24 dev pod0
ip link set pod0 up
ip link set pod1 up
mount --bind hosts /etc/hosts
";

/// What the pods of a manifest would run is run here, with what Kubernetes and the sets add to it: all find each other, and train.
#[test]
fn pods_of_the_manifests_train() {
    for name in MANIFESTS {
        let manifest = manifest(name);
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        fs::write(file("text.txt"), "A pod is a rank, and a rank is a pod. ".repeat(400)).unwrap();
        fs::write(file("hosts"), "10.90.0.1 gpt2-ranks-0-0.gpt2 gpt2-0.gpt2.default gpt2-master-0\n").unwrap();
        let pods: Vec<&Value> =
            pods(&manifest).into_iter().flat_map(|(pods, pod)| (0..pods).map(move |_| pod)).collect();
        let mut script = String::from("PIDS=\n");
        for (rank, pod) in pods.iter().enumerate() {
            let container = &pod["containers"][0];
            let mut words = variables_of(container, &manifest, rank, pods.len());
            words.extend([env!("CARGO_BIN_EXE_gpt2").into(), "train".into()]);
            words.extend(options(container).iter().flat_map(|option| here(option, folder.path())));
            writeln!(script, "env -i '{}' >{rank}.txt 2>&1 &\nPIDS=\"$PIDS $!\"", words.join("' '")).unwrap();
        }
        script += "for PID in $PIDS; do wait $PID; done";
        let run = |script: &str| {
            let script = format!("{POD}{script}");
            let arguments = ["60", "unshare", "--net", "--mount", "sh", "-c", &script];
            Command::new("timeout").args(arguments).current_dir(folder.path()).stdin(Stdio::null()).output().unwrap()
        };
        if !run("").status.success() {
            return println!(
                "skipped: a network and names of its own take root, and the programs unshare, mount and ip"
            );
        }
        let output = run(&script);
        let said: Vec<String> =
            (0..pods.len()).map(|rank| fs::read_to_string(file(&format!("{rank}.txt"))).unwrap_or_default()).collect();
        assert!(output.status.success(), "{name}: {} {said:#?}", String::from_utf8_lossy(&output.stderr));
        assert!(said[0].contains("weights: sha256 "), "{name}: {said:#?}");
    }
}

/// An option of a manifest, for a machine with little time and files in `folder`.
fn here(option: &str, folder: &Path) -> Vec<String> {
    let file = |name: &str| folder.join(name).display().to_string();
    match option.split_once('=').map_or(option, |(name, _)| name) {
        "--preset" => ["--preset=micro", "--tokenizer=bytes", "--batch=4", "--eval-every=0", "--threads=1"]
            .map(String::from)
            .into(),
        "--steps" => vec!["--steps=2".into()],
        "--save-every" => vec!["--save-every=1".into()],
        "--data" => vec![format!("--data={}", file("text.txt"))],
        "--out" => vec![format!("--out={}", file("out"))],
        "--metrics" => vec![],
        _ => vec![option.into()],
    }
}

/// The environment of a pod's container, as `NAME=value`.
fn variables_of(container: &Value, manifest: &Value, rank: usize, ranks: usize) -> Vec<String> {
    let mut known: Vec<(String, String)> = match manifest["kind"].as_str().unwrap() {
        "LeaderWorkerSet" => vec![
            ("LWS_LEADER_ADDRESS".into(), "gpt2-0.gpt2.default".into()),
            ("LWS_GROUP_SIZE".into(), ranks.to_string()),
            ("LWS_WORKER_INDEX".into(), rank.to_string()),
        ],
        "PyTorchJob" => vec![
            ("MASTER_ADDR".into(), "gpt2-master-0".into()),
            ("MASTER_PORT".into(), "23456".into()),
            ("RANK".into(), rank.to_string()),
            ("WORLD_SIZE".into(), ranks.to_string()),
        ],
        _ => vec![("JOB_COMPLETION_INDEX".into(), rank.to_string())],
    };
    for variable in container["env"].as_array().unwrap() {
        let field = variable["valueFrom"]["fieldRef"]["fieldPath"].as_str();
        let value = match (variable["value"].as_str(), field) {
            (Some(value), _) => {
                known.iter().fold(value.to_owned(), |value, (name, known)| value.replace(&format!("$({name})"), known))
            }
            (None, Some("metadata.annotations['batch.kubernetes.io/job-completion-index']")) => rank.to_string(),
            (None, Some("metadata.annotations['jobset.sigs.k8s.io/restart-attempt']")) => "0".into(),
            (None, Some(field)) => panic!("{field}"),
            (None, None) => "a secret for tests only".into(),
        };
        known.push((variable["name"].as_str().unwrap().into(), value));
    }
    known.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
}

/// Against the definitions that the projects publish, in the folder `TEST_CRDS`: what is there under another name or with another type is an error.
#[test]
fn manifests_fit_the_published_definitions() {
    let Some(folder) = std::env::var_os("TEST_CRDS").map(PathBuf::from) else {
        return println!(
            "skipped: TEST_CRDS names no folder of the definitions of JobSet, LeaderWorkerSet and PyTorchJob (`kubectl get crd --output yaml`)"
        );
    };
    for name in MANIFESTS {
        let manifest = manifest(name);
        let schema = definition(&folder, &manifest)
            .unwrap_or_else(|| panic!("no definition of {} in {}", manifest["kind"], folder.display()));
        let mut wrong = Vec::new();
        misfits(&manifest, &schema, "", &mut wrong);
        assert!(wrong.is_empty(), "{name}: {wrong:#?}");
        // What is wrong is found.
        for (place, value) in [("/spec/replicas", json!("one")), ("/spec/unknown", json!(1))] {
            let mut changed = manifest.clone();
            changed["spec"].as_object_mut().unwrap().insert(place.rsplit('/').next().unwrap().into(), value);
            let mut wrong = Vec::new();
            misfits(&changed, &schema, "", &mut wrong);
            assert_eq!(wrong.len(), 1, "{name}: {place}");
        }
    }
}

/// The schema of a manifest's kind, of the first file that has it.
fn definition(folder: &Path, manifest: &Value) -> Option<Value> {
    let (group, version) = manifest["apiVersion"].as_str().unwrap().split_once('/').unwrap();
    let files = fs::read_dir(folder).unwrap().map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
    let definitions = files.flat_map(|text| YamlLoader::load_from_str(&text).unwrap()).map(|yaml| to_json(&yaml));
    let mut specs = definitions.map(|definition| definition["spec"].clone());
    let spec = specs.find(|spec| spec["group"] == group && spec["names"]["kind"] == manifest["kind"])?;
    let versions = spec["versions"].as_array()?.iter();
    Some(versions.clone().find(|known| known["name"] == version)?["schema"]["openAPIV3Schema"].clone())
}

/// Where a value is not as a schema of Kubernetes has it.
fn misfits(value: &Value, schema: &Value, place: &str, wrong: &mut Vec<String>) {
    if schema["x-kubernetes-int-or-string"] == true {
        return if !(value.is_string() || value.is_u64()) {
            wrong.push(format!("{place}: {value}"))
        };
    }
    let allowed = schema["enum"].as_array();
    let fits = allowed.is_none_or(|allowed| allowed.contains(value))
        && match schema["type"].as_str() {
            Some("object") => value.is_object(),
            Some("array") => value.is_array(),
            Some("string") => value.is_string(),
            Some("integer") => value.is_u64(),
            Some("boolean") => value.is_boolean(),
            _ => true,
        };
    if !fits {
        wrong.push(format!("{place}: {value} is not {} {}", schema["type"], schema["enum"]));
    }
    let none = Map::new();
    let fields = value.as_object().unwrap_or(&none);
    for required in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !fields.contains_key(required) {
            wrong.push(format!("{place}: no {required}"));
        }
    }
    for (name, field) in fields {
        let place = format!("{place}/{name}");
        match (&schema["properties"][name], &schema["additionalProperties"]) {
            (Value::Null, Value::Null) if schema["properties"].is_object() => wrong.push(format!("{place}: unknown")),
            (Value::Null, more) => misfits(field, more, &place, wrong),
            (known, _) => misfits(field, known, &place, wrong),
        }
    }
    for (number, item) in value.as_array().into_iter().flatten().enumerate() {
        misfits(item, &schema["items"], &format!("{place}/{number}"), wrong);
    }
}
