# The resolved config beside the results, and the demo's model and data.
rule resolve_config:
    output:
        RUN.config,
    params:
        config=section(*CONFIG.model_dump()),
    log:
        LOGS / "config.log",
    conda:
        "../envs/shakedown.yaml"
    localrule: True
    script:
        "../scripts/resolve_config.py"


rule assets:
    input:
        ancient(RUN.config),
    output:
        RUN.assets / "assets.json",
    params:
        section=section("model", "data", "seed"),
    log:
        LOGS / "assets.log",
    conda:
        "../envs/shakedown.yaml"
    localrule: True
    shell:
        "shakedown assets --config {input} --out $(dirname {output}) 2>&1 | tee {log}"
